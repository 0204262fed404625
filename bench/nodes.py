"""One step of two nodes with two workers each: fastps, Gloo's all-reduce, DDP, and the bound of plain sockets.

The nodes are network namespaces of this machine. The processes of all sides live side by side, and the sides take turns; a
turn's figure is the median of its steps, and a ratio is the median of the rounds' ratios. An all-reduce is alone: what applies
its result is not counted. Rows with `backward_s` have a backward pass that sleeps for so long, spread over its layers.
"""

import math
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial

from fastps.bench.measure import BenchOptions, Row, Spread, check, interleaved
from fastps.bench.two_nodes.namespaces import Link, Nodes, missing_reason, two_nodes
from fastps.bench.two_nodes.turns import LOCAL, NODES, PAIRS, Crew, Side, Turn
from fastps.job.wire import wire_bytes

LINKS = (Link(), Link(1000, 1.0))
LOCAL_STEPS = 32
BACKWARD_S = 0.5
_TRAINED = 1_000_000  # a smaller model is not trained: DDP's buckets are for larger ones
_EXACT, _ROUNDED = 1e-6, 1e-2

FASTPS = {"fastps": Side("fastps")}
SLOW = {  # on the slow link
    "fastps bfloat16": Side("fastps", {"FASTPS_LINK_DTYPE": "bfloat16"}),
    "fastps int8": Side("fastps", {"FASTPS_LINK_DTYPE": "int8"}),
    "fastps local_steps": Side("fastps", {"FASTPS_LOCAL_STEPS": str(LOCAL_STEPS)}, LOCAL_STEPS),
}
PEERS = {
    "limit": {"bound": Side("sockets"), "edge": Side("edge")},
    "gloo": {"gloo": Side("gloo"), "gloo hierarchical": Side("hierarchical")},
}
TRAINING = {"fastps": Side("fastps-training"), "ddp": Side("ddp-training")}


def measure(options: BenchOptions) -> list[Row]:
    """Return the rows of each link and size; where namespaces are not allowed, one that says so."""
    reason = missing_reason()
    if reason:
        return [{"bench": "nodes", "name": "fastps", "missing": reason}]
    rows = []
    for link in LINKS[-1:] if options.smoke else LINKS:
        for parameters in options.parameters:
            rows += _steps(link, parameters, options)
            if "ddp" in options.against and (parameters >= _TRAINED or options.smoke):
                rows += _training(link, parameters, options)
    return rows


def _steps(link: Link, parameters: int, options: BenchOptions) -> list[Row]:
    """The rows without compute."""
    sides = FASTPS | (SLOW if link.rate_mbit else {})
    for name in PEERS.keys() & set(options.against):
        sides |= PEERS[name]
    steps = 2 if options.smoke else 200 if parameters < _TRAINED else 3 if link.rate_mbit else 7
    turns, results, made = _turns(link, sides, parameters, steps, options.repeats)
    for name, side in sides.items():
        wanted = {"fastps": -made[name], "gloo": NODES * LOCAL, "hierarchical": NODES * LOCAL}.get(side.program, 1)
        if name != "fastps local_steps":  # Nesterov momentum between the nodes: no plain number
            allowed = _EXACT if name in FASTPS or side.program != "fastps" else _ROUNDED
            check(math.isclose(results[name], wanted, rel_tol=allowed), f"{wanted} of {name}", results[name])
    return [_row(name, link, parameters, turns) | _used(name, sides[name], parameters, turns) for name in sides]


def _training(link: Link, parameters: int, options: BenchOptions) -> list[Row]:
    """The rows with a backward pass. Both sides train the same model on the same batches."""
    backward_s = 0.02 if options.smoke else BACKWARD_S
    turns, results, _ = _turns(link, TRAINING, parameters, 2 if options.smoke else 3, options.repeats, backward_s)
    first, other = results.values()
    check(math.isclose(first, other, rel_tol=1e-5), f"weights of DDP with an absolute sum of {other}", first)
    return [_row(name, link, parameters, turns) | {"backward_s": backward_s} for name in TRAINING]


def _turns(
    link: Link, sides: Mapping[str, Side], parameters: int, steps: int, repeats: int, backward_s: float = 0.0
) -> tuple[dict[str, list[Turn]], dict[str, float], dict[str, int]]:
    """The turns of all sides by name, their results, and how many steps they made."""
    with two_nodes(link) as nodes, ExitStack() as running:
        crews = {name: running.enter_context(_started(side, nodes, parameters, backward_s)) for name, side in sides.items()}
        turns: dict[str, list[Turn]] = {name: [] for name in sides}

        def once(name: str) -> float:
            turns[name].append(crews[name].turn(steps))
            return turns[name][-1].seconds

        interleaved({name: partial(once, name) for name in sides}, repeats)
        return turns, {name: crew.result() for name, crew in crews.items()}, {name: crew.steps for name, crew in crews.items()}


def _started(side: Side, nodes: Nodes, parameters: int, backward_s: float) -> Crew:
    """Start a side, and wait until it has made a step."""
    crew = Crew(side, nodes, parameters, backward_s)
    try:
        crew.turn(1)
    except BaseException:
        crew.close()
        raise
    return crew


def _row(name: str, link: Link, parameters: int, turns: Mapping[str, list[Turn]]) -> Row:
    own = [turn.seconds for turn in turns["fastps"]]
    spread = Spread(tuple(turn.seconds for turn in turns[name]))
    ratios = [seconds / fastps for seconds, fastps in zip(spread.seconds, own, strict=True)]
    return {
        "bench": "nodes", "name": name, "backend": link.name, "sync": "bsp", "nodes": NODES, "workers": NODES * LOCAL,
        "parameters": parameters, "backward_s": 0.0, **spread.row(), "ratio": statistics.median(ratios),
        "ratio_min": min(ratios), "ratio_max": max(ratios),
    }  # fmt: skip


def _used(name: str, side: Side, parameters: int, turns: Mapping[str, list[Turn]]) -> Row:
    """Bytes of a step, and their ratio to what it must carry; processor time of a GB, and its ratio to plain sockets'."""
    sent, packets = (statistics.median(getattr(turn, key) for turn in turns[name]) for key in ("sent", "packets"))
    needed = needed_bytes(side, parameters)
    # A GB of floats that arrive on the other node, without headers.
    is_counted = side.program in (*PAIRS, "fastps") and side.rounds_of == 1  # local steps are not for the link
    cpu = [turn.cpu_s / needed * 1e9 for turn in turns[name]] if is_counted else []
    found = {
        "bytes_sent": round(sent), "bytes_ratio": sent / needed,
        "packet_bytes_sent": round(packets) or None, "packet_bytes_ratio": packets / needed or None,
        "cpu_s_per_gb": statistics.median(cpu) if cpu else None, "cpu_ratio": None,
    }  # fmt: skip
    if cpu and "bound" in turns and side.program in PAIRS:
        plain = [turn.cpu_s / needed * 1e9 for turn in turns["bound"]]
        found["cpu_ratio"] = statistics.median(own / other for own, other in zip(cpu, plain, strict=True))
    return found


def needed_bytes(side: Side, parameters: int) -> float:
    """The bytes that a step must carry: the leaf node's sum to node 0, and as many of weights back.

    >>> needed_bytes(Side("fastps"), 1000), needed_bytes(SLOW["fastps local_steps"], 1000)
    (8000.0, 250.0)
    """
    floats = wire_bytes(side.variables.get("FASTPS_LINK_DTYPE", "float32"), parameters)
    return 2 * floats / side.rounds_of
