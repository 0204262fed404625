"""Parsing of the options of `fastps simulate` into values."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fastps.errors import UsageError
from fastps.job.policy import Policy
from fastps.job.specs import parse_policies
from fastps.lab.virtual.units import read_bytes, read_ns, read_rate

if TYPE_CHECKING:
    from fastps.simulation.simulate import Simulation


_CHANGE = "NUMBER@TIME, such as 3@12s"
_FACTORS = "NUMBER:FACTOR or FIRST-LAST:FACTOR, such as 0:3 or 0-9:3"


def _text(default: Any, help_: str, metavar: str | None = None) -> Any:
    """An option of `fastps simulate`, with its help and what its value looks like there."""
    return field(default=default, metadata={"help": help_, "metavar": metavar})


@dataclass(frozen=True, kw_only=True)
class SimulationTexts:
    """The options that are read as texts with units, as written."""

    compute: str = _text(
        "lognormal:10ms,0.3",
        "How long a step computes: constant:TIME, normal:MEAN,DEVIATION, lognormal:MEDIAN,SIGMA (of the logarithm),"
        " pareto:LEAST,SHAPE, or replay:FILE (a line of times such as 10ms 12ms for all workers, or a line for each).",
    )
    speed: Sequence[str] = _text((), f"Workers that are FACTOR times as fast: {_FACTORS}; may be repeated.")
    straggler: Sequence[str] = _text((), f"Workers that compute FACTOR times as long: {_FACTORS}; may be repeated.")
    burst: str | None = _text(None, "Each worker is slow now and then, such as 10s:500ms:3; mean times.", "EVERY:LENGTH:FACTOR")
    model_bytes: str = _text("0", "Bytes of a push, and of a pull, such as 100MB.", "SIZE")
    bandwidth: str = _text("0", "Of each server's port, each direction, such as 10Gbit; 0: without bound.", "RATE")
    worker_bandwidth: str = _text("0", "Of each worker's port, in even parts for the shards; 0: without bound.", "RATE")
    latency: str = _text("0s", "From the last byte sent to its arrival, such as 50us.", "TIME")
    service_time: str = _text("0s", "Of a server for each message, push or answer, one after the other, such as 100us.", "TIME")
    service_rate: str = _text("0", "And bytes of it that a server goes through, such as 5GB; 0: without bound.", "RATE")
    update_time: str = _text("0s", "Of a server for each update, such as 1ms.", "TIME")
    slow_server: Sequence[str] = _text((), f"Shards whose server is FACTOR times as slow: {_FACTORS}; may be repeated.")
    late_push: str | None = _text(None, "A share of the pushes comes so late, such as 0.01:0.5s.", "SHARE:TIME")
    late_pull: str | None = _text(None, "The same for answers to workers.", "SHARE:TIME")
    kill: Sequence[str] = _text((), f"A worker that is killed, and when: {_CHANGE}; may be repeated.")
    join: Sequence[str] = _text((), f"A worker that joins in the place of one that was killed, and when: {_CHANGE}.")


def read_simulation(texts: SimulationTexts, **numbers: Any) -> "Simulation":
    """Build the simulation that the options describe; `numbers` are passed to Simulation unchanged. Raises UsageError."""
    from fastps.lab.virtual.compute_texts import parse_compute
    from fastps.simulation.simulate import Simulation

    factors = {worker: 1 / factor for worker, factor in _factors("--speed", texts.speed).items()}
    for worker, factor in _factors("--straggler", texts.straggler).items():
        factors[worker] = factors.get(worker, 1.0) * factor
    bursts = None
    if texts.burst is not None:
        every, length, slower = _split("--burst", texts.burst, 3, "EVERY:LENGTH:FACTOR such as 10s:500ms:3")
        bursts = (read_ns("--burst", every), read_ns("--burst", length), _number("--burst", slower, 1e-9, 1e9))
    return Simulation(
        compute=replace(parse_compute(texts.compute), factors=factors, bursts=bursts),
        model_bytes=read_bytes("--model-bytes", texts.model_bytes),
        bandwidth=read_rate("--bandwidth", texts.bandwidth),
        worker_bandwidth=read_rate("--worker-bandwidth", texts.worker_bandwidth),
        latency_ns=round(read_ns("--latency", texts.latency)),
        service_ns=round(read_ns("--service-time", texts.service_time)),
        service_rate=read_rate("--service-rate", texts.service_rate),
        update_ns=round(read_ns("--update-time", texts.update_time)),
        slow_servers=_factors("--slow-server", texts.slow_server),
        late_pushes=_late("--late-push", texts.late_push),
        late_pulls=_late("--late-pull", texts.late_pull),
        changes=sorted([*_changes("--kill", texts.kill), *_changes("--join", texts.join)]),
        **numbers,
    )


def read_policies(sync: str, shards: int | None) -> list[Policy]:
    """Parse a list of specs, and set the policies' number of shards if it is given. Raises PolicyError."""
    policies = parse_policies(sync)
    if shards is None:
        return policies
    return [policy if policy.shards == shards else policy.with_options(shards=shards) for policy in policies]


def _split(name: str, text: str, count: int, expected: str) -> list[str]:
    parts = text.split(":")
    if len(parts) != count:
        raise UsageError(f"{name}: expected {expected}, found {text!r}")
    return parts


def _number(name: str, text: str, least: float, most: float) -> float:
    try:
        found = float(text)
    except ValueError:
        found = float("nan")
    if not least <= found <= most:
        raise UsageError(f"{name}: expected a number of {least:g} to {most:g}, found {text!r}")
    return found


def _factors(name: str, texts: Sequence[str]) -> dict[int, float]:
    """Parse NUMBER:FACTOR or FIRST-LAST:FACTOR, several separated by commas.

    >>> _factors("--speed", ["0:3,2-3:0.5"])
    {0: 3.0, 2: 0.5, 3: 0.5}
    """
    found: dict[int, float] = {}
    for text in (part for written in texts for part in written.split(",")):
        numbers, factor = _split(name, text, 2, _FACTORS)
        first, dash, last = numbers.partition("-")
        try:
            chosen = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            raise UsageError(f"{name}: expected NUMBER:FACTOR or FIRST-LAST:FACTOR, found {text!r}") from None
        if len(chosen) > 10_000_000:
            raise UsageError(f"{name}: expected at most 10000000 workers, found {text!r}")
        found.update(dict.fromkeys(chosen, _number(name, factor, 1e-6, 1e6)))
    return found


def _changes(name: str, texts: Sequence[str]) -> list[tuple[int, int, bool]]:
    """Parse NUMBER@TIME, several separated by commas.

    >>> _changes("--join", ["3@12s"])
    [(12000000000, 3, True)]
    """
    found = []
    for text in (part for written in texts for part in written.split(",")):
        number, at, time = text.partition("@")
        if not (number.isdecimal() and len(number) < 9 and at):
            raise UsageError(f"{name}: expected {_CHANGE}, found {text!r}")
        found.append((round(read_ns(name, time)), int(number), name == "--join"))
    return found


def _late(name: str, text: str | None) -> tuple[float, int]:
    """Parse SHARE:TIME."""
    if text is None:
        return 0.0, 0
    share, delay = _split(name, text, 2, "SHARE:TIME such as 0.0016:4s")
    return _number(name, share, 0.0, 1.0), round(read_ns(name, delay))
