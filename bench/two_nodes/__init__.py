"""The sides of `fastps bench nodes`: the processes that one turn starts on two nodes, and what it counts."""
