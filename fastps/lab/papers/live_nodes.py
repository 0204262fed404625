"""Jobs of several nodes on this machine, live: each node is a network namespace, and its workers compute by sleeping.

So the times of computing do not depend on the machine's cores, and communication is real.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from fastps.errors import Error
from fastps.lab.measuring.namespaces import Cluster
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.deadline import Deadline
from fastps.system.ports import free_port

_MOST_S = 240.0


class LiveRunError(Error, RuntimeError):
    """A worker of a live run has failed."""


@dataclass(frozen=True)
class LiveJob:
    """What to run.

    Attributes:
        sync: the discipline between nodes.
        workers: the workers of each node.
        parameters: floats of the model.
        compute_ms: the time for which a worker sleeps in each step.
        seconds: how long each worker makes steps.
        link_dtype, local_steps, local_overlap: as in `fastps run`.
        traces: a folder for a trace of each node, run.node0.trace and so on; None: no traces.
    """

    sync: str
    workers: Sequence[int]
    parameters: int
    compute_ms: float
    seconds: float
    link_dtype: str = "float32"
    traces: Path | None = None
    local_steps: int = 0
    local_overlap: int = 0


@dataclass(frozen=True)
class LiveRun:
    """The steps of every worker, as (begin, end of computing, end) in ns of one clock; the first steps are left out."""

    steps: list[list[tuple[int, int, int]]]

    @property
    def compute_share(self) -> float:
        """The share of computing in the time of computing and communication, the mean of all workers (Rudra, Table 1)."""
        return fmean(
            sum(computed - begin for begin, computed, _ in each) / sum(end - begin for begin, _, end in each)
            for each in self.steps
        )

    def steps_per_s(self, workers: Sequence[int]) -> float:
        """The steps of all nodes per second while all workers made steps; `workers` are those of each node."""
        begin_ns = max(each[0][0] for each in self.steps)
        end_ns = min(each[-1][2] for each in self.steps)
        counts = [sum(begin_ns < end <= end_ns for _, _, end in each) for each in self.steps]
        firsts = [sum(workers[:node]) for node in range(len(workers))]
        return 1e9 * sum(counts[first] for first in firsts) / max(1, end_ns - begin_ns)


def run_live(cluster: Cluster, job: LiveJob, clock: Clock = SYSTEM_CLOCK) -> LiveRun:
    """Run a job on the first nodes of a cluster. Raises LiveRunError."""
    port, total = free_port(), sum(job.workers)
    outputs_folder = tempfile.TemporaryDirectory(prefix="fastps-live-")
    outputs = [Path(outputs_folder.name) / str(rank) for rank in range(total)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node, count in enumerate(job.workers):
            for local in range(count):
                command = [sys.executable, "-m", "fastps.lab.papers.live_member"]
                command += [str(job.parameters), str(job.compute_ms), str(job.seconds)]
                environment = {**os.environ, **_variables(job, cluster, node, local, port, total)}
                with outputs[len(processes)].open("wb") as out:
                    processes.append(
                        subprocess.Popen(cluster.command(node, command), env=environment, stdout=out, stderr=subprocess.STDOUT)
                    )
        _await_all(processes, outputs, clock)
        return LiveRun([_steps_of(output, rank) for rank, output in enumerate(outputs)])
    finally:
        for process in processes:
            process.kill()
            process.wait()
        outputs_folder.cleanup()


def _variables(job: LiveJob, cluster: Cluster, node: int, local: int, port: int, total: int) -> dict[str, str]:
    """The environment of one worker."""
    variables = {
        "RANK": sum(job.workers[:node]) + local, "WORLD_SIZE": total, "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": job.workers[node], "GROUP_RANK": node, "GROUP_WORLD_SIZE": len(job.workers),
        "MASTER_ADDR": cluster.address(0), "MASTER_PORT": port, "FASTPS_SYNC": job.sync,
        "FASTPS_LINK_DTYPE": job.link_dtype, "FASTPS_LOCAL_STEPS": job.local_steps,
        "FASTPS_LOCAL_OVERLAP": job.local_overlap, "OMP_NUM_THREADS": 1, "TORCH_CPP_LOG_LEVEL": "ERROR",
    }  # fmt: skip
    if job.traces is not None:
        variables["FASTPS_TRACE"] = job.traces / "run.trace"  # the files have the node's number
    return {name: str(value) for name, value in variables.items()}


def _await_all(processes: "Sequence[subprocess.Popen[bytes]]", outputs: Sequence[Path], clock: Clock) -> None:
    """Wait until all workers have ended, or one has failed."""
    over = Deadline(clock.now_ns(), int(1e9 * _MOST_S))
    while None in (codes := [process.poll() for process in processes]) and not any(codes):
        if over.is_over(clock.now_ns()):
            left = [rank for rank, code in enumerate(codes) if code is None]
            raise LiveRunError(f"workers {left} did not end in {_MOST_S:g} s")
        clock.sleep_ns(50_000_000)
    failed = next((rank for rank, code in enumerate(codes) if code), None)
    if failed is not None:
        raise LiveRunError(f"worker {failed} failed: {outputs[failed].read_text()[-500:]}")


def _steps_of(output: Path, rank: int) -> list[tuple[int, int, int]]:
    steps = [(begin, computed, end) for begin, computed, end in json.loads(output.read_text().splitlines()[-1])]
    if len(steps) < 2:
        raise LiveRunError(f"worker {rank} made {len(steps)} steps: run longer")
    return steps
