"""Seeded simulation of the real protocol under faults: many seeds in one process a core, and one verdict.

The simulation needs the build with failpoints (`make hooks`), which is not for training: this module finds that build and runs
the seeds in child processes that import it.
"""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.lab.worlds.chaos_worlds import plan_of
from fastps.lab.worlds.findings import Findings
from fastps.system.processes import start_child

KINDS = ("crashes", "restarts", "stalls", "passed_by", "damaged_lanes", "spurious_wakes", "skewed_clocks", "slow_processes")
_BATCH = 250  # seeds of one line of a child's output


@dataclass
class HostFindings(Findings):
    """See Findings; here `steps` are accesses to shared memory, and all invariants are checked at each.

    Attributes:
        versions: commits.
        worst_detection_s: longest simulated time from a death until the first survivor detects it.
    """

    versions: int = 0
    worst_detection_s: float = 0.0

    def add(self, other: Findings) -> None:
        """Add the other's totals."""
        assert isinstance(other, HostFindings)
        super().add(other)
        self.versions += other.versions
        self.worst_detection_s = max(self.worst_detection_s, other.worst_detection_s)


def hooks_path() -> Path:
    """Return the build with failpoints: FASTPS_HOOKS_PATH, or build/hooks beside the sources. Raises UsageError."""
    given = os.environ.get("FASTPS_HOOKS_PATH")
    sources = Path(__file__).resolve().parents[3]
    path = Path(given) if given else sources / "build" / "hooks"
    if not list((path / "fastps" / "kernels" / "chaos").glob("world.*.so")):
        raise UsageError(
            f"expected the failpoint build in {path}, found none: run `make hooks` in a checkout of fastps"
            " (FASTPS_HOOKS_PATH names another place)"
        )
    return path


def simulate(first: int, count: int, *, mutant: str | None = None, world: Any = None, stop: bool = False) -> HostFindings:
    """Simulate the seeds from `first` on, in this process, which must have imported the build with failpoints.

    `mutant`: a fault of the protocol to switch on. `stop`: end at the first violation.
    """
    from fastps.kernels.chaos import failpoints
    from fastps.kernels.chaos.world import World

    findings = HostFindings()
    world = world or World()
    failpoints.switch_on(mutant)
    try:
        for seed in range(first, first + count):
            plan = plan_of(seed)
            outcome = world.run(seed, **plan.measures)
            found = HostFindings(1, outcome["events"], {kind: outcome[kind] for kind in KINDS})
            found.versions, found.worst_detection_s = outcome["flips"], outcome["detection_s"]
            if outcome["violation"]:
                found.violations.append({"seed": seed, "spec": plan.spec, "violation": outcome["violation"]})
            findings.add(found)
            if stop and findings.violations:
                break
    finally:
        failpoints.switch_on(None)
    return findings


def mutants(path: Path) -> dict[str, str]:
    """Return the mutants of the build at `path`: name to description."""
    code = "import json; from fastps.kernels.chaos import failpoints; print(json.dumps(failpoints.MUTANTS))"
    environment = {**os.environ, "PYTHONPATH": str(path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, cwd=path, check=True
    )
    found: dict[str, str] = json.loads(ended.stdout)
    return found


def run(
    seeds: int, first: int = 0, *, mutant: str | None = None, watch: Callable[[HostFindings], None] | None = None
) -> HostFindings:
    """Simulate `seeds` seeds from `first` on, in one child process a core; `watch` is called with the totals so far.

    Raises UsageError without a build with failpoints, and RuntimeError if a child dies, which means a crash of the simulated
    code itself.
    """
    path = hooks_path()
    known = mutants(path)
    if mutant is not None and mutant not in known:
        raise UsageError(f"--mutant: expected one of {', '.join(known)}, found {mutant!r}")
    cores = min(len(os.sched_getaffinity(0)), max(1, seeds // _BATCH))
    environment = {**os.environ, "PYTHONPATH": str(path)}
    children = []
    for core in range(cores):
        begin, end = first + seeds * core // cores, first + seeds * (core + 1) // cores
        command = [sys.executable, "-m", "fastps.lab.worlds.chaos", str(begin), str(end - begin), mutant or ""]
        children.append(start_child(command, stdout=subprocess.PIPE, env=environment, cwd=path))
    total = HostFindings()
    try:
        for findings in _lines_of(children):
            total.add(findings)
            if watch is not None:
                watch(total)
    finally:
        for child in children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
    if total.seeds != seeds:
        raise RuntimeError(
            f"expected the findings of {seeds} seeds, found {total.seeds}: a child process died; run fewer seeds"
        )
    return total


def _lines_of(children: list[subprocess.Popen[bytes]]) -> Iterator[HostFindings]:
    """Yield the children's findings, one line each, as they come."""
    with selectors.DefaultSelector() as selector:
        for child in children:
            assert child.stdout is not None
            selector.register(child.stdout, selectors.EVENT_READ)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    yield HostFindings(**json.loads(line))
                else:
                    selector.unregister(key.fileobj)


def _play(first: int, count: int, mutant: str | None) -> None:
    """Do a child's work: print a line of JSON for each batch of seeds."""
    from fastps.kernels.chaos.world import World

    world = World()
    for begin in range(first, first + count, _BATCH):
        findings = simulate(begin, min(_BATCH, first + count - begin), mutant=mutant, world=world)
        sys.stdout.write(json.dumps(findings.__dict__) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _play(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None)
