"""Embeddings of a graph's nodes, learned from the graph alone, that tell its communities: the karate club, or a larger graph.

Each node has a row in a table. One layer mixes it with the mean of its neighbours' rows (GraphSAGE). Nodes that random walks
visit close to each other shall be alike, and random nodes shall not. The club split in two, and each member is then given to
the faction whose leader it is most alike: no label is used in training, and one for each faction after it.

python examples/gnn_nodes.py
fastps run -n 2 examples/gnn_nodes.py
fastps run -n 2 --sync asp examples/gnn_nodes.py --graph planted --nodes 2000
torchrun --standalone --nproc-per-node 2 examples/gnn_nodes.py

`--sparse` gives the table gradients of the rows that a step touches.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import networkx
import torch
from torch import nn
from torch.nn import functional

import fastps


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", choices=("karate", "planted"), default="karate", help="planted: random, with 4 communities")
    parser.add_argument("--nodes", type=int, default=400, help="nodes of a planted graph (400)")
    parser.add_argument("--steps", type=int, default=400, help="steps of all workers together (400)")
    parser.add_argument("--walks", type=int, default=64, help="random walks of a step (64)")
    parser.add_argument("--length", type=int, default=5, help="nodes of a walk (5)")
    parser.add_argument("--width", type=int, default=16, help="floats of a node's embedding (16)")
    parser.add_argument("--neighbours", type=int, default=8, help="neighbours drawn for a node's mean (8)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of Adagrad (0.05)")
    parser.add_argument("--sparse", action="store_true", help="sparse gradients of the table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures at the end into this file")
    return parser.parse_args()


class Graph:
    """A graph as two arrays (each node's neighbours, one after the other, and where they begin), and its communities."""

    def __init__(self, graph: networkx.Graph, communities: list[int]) -> None:
        self.graph = graph
        self.communities = torch.tensor(communities)
        self.degrees = torch.tensor([graph.degree[node] for node in graph])
        self._begins = functional.pad(self.degrees.cumsum(0), (1, 0))
        self._neighbours = torch.tensor([neighbour for node in graph for neighbour in graph[node]])

    def neighbours(self, nodes: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
        """`count` random neighbours of each node, with repeats."""
        drawn = torch.rand(*nodes.shape, count, generator=generator) * self.degrees[nodes].unsqueeze(-1)
        return self._neighbours[self._begins[nodes].unsqueeze(-1) + drawn.long()]

    def walks(self, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
        """Random walks from random nodes, one a row."""
        walk = [torch.randint(len(self.degrees), (count,), generator=generator)]
        while len(walk) < length:
            walk.append(self.neighbours(walk[-1], 1, generator).squeeze(-1))
        return torch.stack(walk, 1)

    def leaders(self) -> torch.Tensor:
        """The node with the most neighbours in each community."""
        members = [torch.nonzero(self.communities == number).squeeze(-1) for number in range(int(self.communities.max()) + 1)]
        return torch.stack([nodes[self.degrees[nodes].argmax()] for nodes in members])

    def modularity(self, communities: torch.Tensor) -> float:
        """How many more edges lie within these communities than by chance, as a share of all edges."""
        found = [set(torch.nonzero(communities == number).flatten().tolist()) for number in communities.unique()]
        return networkx.community.modularity(self.graph, found, weight=None)


def open_graph(name: str, nodes: int) -> Graph:
    """The karate club with its two factions, or a random graph of four communities with ten neighbours a node, eight within."""
    if name == "karate":
        club = networkx.karate_club_graph()
        return Graph(club, [int(club.nodes[node]["club"] == "Officer") for node in club])
    size = nodes // 4
    planted = networkx.planted_partition_graph(4, size, 8 / size, 2 / (3 * size), seed=1)
    planted.remove_nodes_from(list(networkx.isolates(planted)))
    return Graph(networkx.convert_node_labels_to_integers(planted), [node // size for node in planted])


class NodeModel(nn.Module):
    """The table, and the layer over a node's row and its neighbours' mean."""

    def __init__(self, graph: Graph, arguments: argparse.Namespace) -> None:
        super().__init__()
        self._graph, self._neighbours = graph, arguments.neighbours
        self.table = nn.Embedding(len(graph.degrees), arguments.width, sparse=arguments.sparse)
        nn.init.normal_(self.table.weight, std=0.1)
        self.mix = nn.Linear(2 * arguments.width, arguments.width)

    def forward(self, nodes: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """The nodes' embeddings, of length 1."""
        of_neighbours = self.table(self._graph.neighbours(nodes, self._neighbours, generator)).mean(-2)
        return functional.normalize(self.mix(torch.cat([self.table(nodes), of_neighbours], -1)), dim=-1)

    def loss(self, walks: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Each walk's first node and the others of the walk are alike, and it and as many random nodes are not."""
        others = torch.randint(len(self._graph.degrees), (len(walks), walks.shape[1] - 1), generator=generator)
        embedded = self(torch.cat([walks, others], 1), generator)
        likeness = 5 * (embedded[:, :1] * embedded[:, 1:]).sum(-1)
        alike = torch.cat([torch.ones_like(walks[:, 1:]), torch.zeros_like(others)], 1).float()
        return functional.binary_cross_entropy_with_logits(likeness, alike)


def train(arguments: argparse.Namespace, model: NodeModel, optimizer: torch.optim.Optimizer, graph: Graph) -> None:
    """Make this worker's share of the steps."""
    rank, workers = fastps.rank(), fastps.world_size()
    generator = torch.Generator().manual_seed(1000 * arguments.seed + rank)
    steps, began = -(-arguments.steps // workers), time.perf_counter()
    for step in range(steps):
        optimizer.zero_grad()
        loss = model.loss(graph.walks(arguments.walks, arguments.length, generator), generator)
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}, {time.perf_counter() - began:.1f} s", flush=True)


@torch.no_grad()
def report(arguments: argparse.Namespace, model: NodeModel, graph: Graph) -> None:
    """Give each node to the leader that it is most alike, and compare that with the true communities."""
    generator = torch.Generator().manual_seed(0)
    embedded = torch.stack([model(torch.arange(len(graph.degrees)), generator) for _ in range(8)]).mean(0)
    found = (embedded @ embedded[graph.leaders()].T).argmax(-1)
    figures = {
        "right": int((found == graph.communities).sum()),
        "nodes": len(found),
        "modularity": graph.modularity(found),
        "true_modularity": graph.modularity(graph.communities),
    }
    print(f"{figures['right']} of {figures['nodes']} nodes are with their community;", end=" ")
    print(f"modularity {figures['modularity']:.3f}, of the true communities {figures['true_modularity']:.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures))


def main() -> None:
    """Train as one of the workers; worker 0 judges the result."""
    arguments = options()
    torch.set_num_threads(1)  # the model is too small to gain from more
    torch.manual_seed(arguments.seed)
    graph = open_graph(arguments.graph, arguments.nodes)
    model = NodeModel(graph, arguments)
    inner = torch.optim.Adagrad(model.parameters(), lr=arguments.lr)
    with fastps.DistributedOptimizer(inner, model=model) as optimizer:
        train(arguments, model, optimizer, graph)
        if fastps.rank() == 0:
            optimizer.wait_for_others()
            report(arguments, model, graph)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
