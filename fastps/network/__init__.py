"""Several nodes: the sums of each node travel to the node that holds the weights, and the weights travel back.

Two arenas a node. The leaf arena is the one that a job of one node has: the node's workers push into it. The home arena, on
node 0, is an ordinary store whose workers are nodes, so the same compiled scheduler decides between nodes. An agent process on
each node serves the leaf arena, and is the only process that sends or receives.

Border: messages, links and agents. This package knows no discipline, no model and no framework beyond torch's tensors and Gloo.
Arrows: it uses store, membership, job and system; torch/ and processes/ start it.
"""
