"""Rudra's Table 1, live: nodes are network namespaces, joined by links of 100 Mbit/s, and learners compute by sleeping."""

from fastps.job.specs import parse_policy
from fastps.lab.measuring.namespaces import cluster, missing_reason
from fastps.lab.measuring.simulated_links import MeasuredEdge, MeasuredLinks, ModelOnNodes, on_links
from fastps.lab.papers.expectations import InOrder
from fastps.lab.papers.live_nodes import LiveJob, run_live
from fastps.lab.papers.row import Effort, Row
from fastps.lab.papers.rudra_cluster import SPREAD
from fastps.lab.papers.runs import MS, lognormal
from fastps.simulation.simulate import Simulation, simulate

_LEARNERS, _LEAVES = 6, 3
_RATE_MBIT = 100
_PARAMETERS = 250_000  # a push of 1 MB takes 80 ms on a link
_COMPUTE_MS = 80.0
_EXCHANGE_EVERY = 8  # versions
_LINE_BYTES_S = 1e6 * _RATE_MBIT / 8 * 1448 / 1538  # what TCP carries of Ethernet's frames
_EDGE = MeasuredEdge(_LINE_BYTES_S, _LINE_BYTES_S, _LINE_BYTES_S, _LINE_BYTES_S, 0, round(2e14 / _LINE_BYTES_S))


def _live(effort: Effort) -> dict[str, float]:
    """The shares of computing, live, and those that the simulator predicts for the same links."""
    flat, tree = (1,) * _LEARNERS, (_LEARNERS // _LEAVES,) * _LEAVES
    seconds = float(effort.choose(20, 8))
    jobs = {
        "base": LiveJob("softsync:1", flat, _PARAMETERS, _COMPUTE_MS, seconds),
        "adv": LiveJob("softsync:1", tree, _PARAMETERS, _COMPUTE_MS, seconds),
        "overlapped exchange": LiveJob(
            "asp", tree, _PARAMETERS, _COMPUTE_MS, seconds, local_steps=_EXCHANGE_EVERY, local_overlap=_EXCHANGE_EVERY
        ),
    }
    with cluster(_LEARNERS, _RATE_MBIT) as nodes:
        found = {name: run_live(nodes, job).compute_share for name, job in jobs.items()}
    for name in ("base", "adv"):
        found[f"{name}, simulated"] = _simulated(len(jobs[name].workers))
    return found


def _simulated(nodes: int) -> float:
    """The share for so many nodes on the same links, in virtual time."""
    simulation = Simulation(workers=nodes, steps=200, compute=lognormal(_COMPUTE_MS * MS, SPREAD))
    model = ModelOnNodes(_PARAMETERS, nodes)
    return 1 - float(
        simulate(*on_links(simulation, parse_policy("softsync:1"), MeasuredLinks((_EDGE,)), model)).row["wait_share"]
    )


LIVE = (
    Row(
        id="rudra/table-1-live",
        source="Table 1",
        items=("Table 1",),
        claim="Of their time, learners compute 12 % in Rudra-base and 57 % in adv: the order, live. adv* has no live form"
        " between nodes.",
        measure=_live,
        expect=(InOrder(("base", "adv"), margin=0.1), InOrder(("adv", "overlapped exchange"), margin=0.1)),
        is_live=True,
        missing=missing_reason,
        assumed=(
            f"{_LEARNERS} learners, which sleep {_COMPUTE_MS:g} ms for a step, and a model of {_PARAMETERS:,} floats on links"
            f" of {_RATE_MBIT} Mbit/s, so that a push takes as long as computing (in the paper 60 learners, 300 MB). base: a"
            " node for each learner, all push to node 0 (1-softsync). adv: three nodes of two learners, each node sends the"
            " sum of its learners. adv* has no live form between nodes, because a node's push waits for its weights. What comes"
            f" nearest is an exchange of what a node has moved every {_EXCHANGE_EVERY} versions, while it goes on"
            " (--local-steps, --local-overlap); it is another algorithm, and sends fewer bytes. Node 0's own learners cross"
            " no link, in base and in adv. Simulated times vary by 5 %."
        ),
        tried=("simulated times that do not vary at all, so that all nodes always push at the same instant: 0.17 and 0.46",),
    ),
)
