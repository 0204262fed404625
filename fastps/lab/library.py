"""What the commands do with runs, for programs: simulate disciplines, compare them, read a trace, write a report.

Border: it calls what the commands call, and returns their rows, whose keys are those of `--json`. `import fastps` loads it when
one of its functions is first used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from fastps.errors import UsageError
from fastps.job.specs import parse_policies
from fastps.lab.demo import comparison, repeats
from fastps.lab.demo import runs as demo_runs
from fastps.lab.demo.data import load
from fastps.lab.demo.options import TrainingOptions
from fastps.lab.measuring.compared_script import run_script
from fastps.lab.virtual import side_by_side
from fastps.lab.virtual.options import SimulationTexts, read_policies, read_simulation
from fastps.processes.script import command_of
from fastps.report import page
from fastps.report import run as run_page
from fastps.simulation import simulate as simulation
from fastps.tracing import parts, summary
from fastps.tracing.file import OUTCOMES, Lines, Trace
from fastps.tracing.merging import merge_nodes

Row = dict[str, Any]
Columns = Mapping[str, npt.NDArray[Any]]
_TEXTS = {each.name for each in fields(SimulationTexts)}


def simulate(
    sync: str, *, workers: int = 4, steps: int = 1000, shards: int | None = None, seed: int = 0, **options: Any
) -> list[Row]:
    """Play disciplines in virtual time, by the scheduler that a job runs, as `fastps simulate` does.

    Args:
        sync: specs, separated by commas, such as "bsp,asp,dssp:3,15".
        workers: the number of workers.
        steps: the steps of a worker; the run ends after workers x steps pushes, from any of them.
        shards: the servers that the model is cut over; None: as the spec says.
        seed: decides all draws.
        options: others of `fastps simulate` by name, with its texts: `compute="lognormal:50ms,0.3"`, `straggler=["0:3"]`,
            `model_bytes="500MB"`, `bandwidth="10Gbit"`, `kill=["3@12s"]`; and `leave`, `batch` and `cores`.

    Returns:
        A row for each discipline, with the keys of `fastps simulate --json`.

    Raises:
        PolicyError: A spec is not valid.
        UsageError: An option is not valid.

    >>> bsp, asp = simulate("bsp,asp", workers=4, steps=50, straggler=["0:3"])
    >>> asp["sync"], asp["steps_per_s"] > 1.5 * bsp["steps_per_s"]
    ('asp', True)
    """
    numbers = {"leave", "batch", "cores"}
    if unknown := sorted(options.keys() - _TEXTS - numbers):
        raise UsageError(f"simulate: expected options of fastps simulate, found {unknown[0]!r}")
    texts = SimulationTexts(**{name: each for name, each in options.items() if name in _TEXTS})
    others = {name: each for name, each in options.items() if name in numbers}
    described = read_simulation(texts, workers=workers, steps=steps, seed=seed, **others)
    policies = read_policies(sync, shards)
    for policy in policies:
        policy.check_workers(workers)
    return [simulation.simulate(policy, described).row for policy in policies]


def compare(
    sync: str,
    *,
    script: Sequence[str] | str | None = None,
    workers: int = 4,
    runs: int = 1,
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> list[Row]:
    """Train the same network, or a script, under several disciplines by turns, as `fastps compare` does.

    Workers are processes of their own; call it in the main thread.

    Args:
        sync: specs, separated by commas.
        script: a script, or a script and its arguments; None: the network of `fastps train`.
        workers: the number of worker processes.
        runs: runs of each discipline and seed.
        seeds: of weights and of the order of samples; not with a script.
        options: without a script, others of `fastps train`: `data`, `epochs`, `batch_size`, `learning_rate`, `momentum`,
            `straggler={0: 3.0}`, `transfer_ms`, `compute_ms`, `push_dtype`.

    Returns:
        A row for each discipline, with the keys of `fastps compare --json`: medians; of several runs also `least`, `most` and
        `each`.

    Raises:
        PolicyError: A spec is not valid.
        UsageError: An option is not valid, or the script does not train.
        Error: A run failed.
    """
    if runs < 1 or not seeds:
        raise UsageError(f"compare: expected 1 run or more and a seed or more, found {runs} and {len(seeds)}")
    policies = parse_policies(sync)
    for policy in policies:
        policy.check_workers(workers)
    if script is not None:
        if options or tuple(seeds) != (0,):
            found = next(iter(options), "seeds")
            raise UsageError(f"compare: expected a script that says what is trained, found {found} beside it")
        command = command_of([script] if isinstance(script, str) else list(script), False)
        return repeats.in_rounds(policies, seeds, runs, lambda policy, seed: run_script(command, policy, workers))
    known = {each.name for each in fields(TrainingOptions)} - {"sync", "workers", "seed", "warm_start", "weights_file"}
    if unknown := sorted(options.keys() - known):
        raise UsageError(f"compare: expected options of fastps train, found {unknown[0]!r}")
    options["straggler"] = {str(worker): factor for worker, factor in options.get("straggler", {}).items()}
    training, console = TrainingOptions(workers=workers, **options), Console(stderr=True)
    data = load(training.data)
    return repeats.in_rounds(
        policies,
        seeds,
        runs,
        lambda policy, seed: demo_runs.train(replace(training, sync=policy.spec, seed=seed), data, console, progress=False),
    )


@dataclass(frozen=True)
class Recording:
    """A recorded run as columns, of `read_trace`. `pandas.DataFrame(recording.steps)` is a table.

    Times are ns of the machine's monotonic clock; those of several nodes are on node 0's.
    """

    trace: Trace = field(repr=False)  # not stable

    @property
    def header(self) -> Mapping[str, Any]:
        """What the recorders say of the job: `sync`, `workers`, `shards`, `machine`."""
        return self.trace.header

    @cached_property
    def steps(self) -> Columns:
        """A row for each step: `worker`, `step`, `samples`, `read_version`; the times `begin_ns`, `computed_ns`, `posted_ns`,
        `pushed_ns`, `granted_ns`, `end_ns`; and `cpu_ns`, the worker's processor time while it computed.
        """
        return _columns(self.trace.steps)

    @cached_property
    def pushes(self) -> Columns:
        """A row for each push and shard: `worker`, `step`, `shard`, `read_version`, `version`, `staleness`, `decided_ns`, and
        `outcome`: folded, dropped, undecided or rejected.
        """
        found = dict(_columns(self.trace.pushes))
        return {**found, "outcome": np.array(OUTCOMES)[found.pop("fate")]}

    @property
    def summary(self) -> Row:
        """The whole run, with the keys of the first row of `fastps trace --json`."""
        return summary.summary_row(self.trace)

    @property
    def workers(self) -> list[Row]:
        """A row for each worker, with the keys of `fastps trace --json`."""
        return summary.worker_rows(self.trace)


def _columns(lines: Lines) -> dict[str, npt.NDArray[Any]]:
    return {name: lines[name] for name in lines.dtype.names or () if name != "written"}


def read_trace(*files: str | Path) -> Recording:
    """Read what `--trace`, or `fastps.trace` in a script, has recorded: one file, or one of each node of a job.

    Raises:
        Error: A file is no trace, or damaged.
        UsageError: No file is given.
    """
    if not files:
        raise UsageError("read_trace: expected a file that --trace wrote, or one of each node, found none")
    read = [(Path(file), parts.load(Path(file))) for file in files]
    return Recording(merge_nodes(read) if len(read) > 1 else read[0][1])


def write_report(found: Recording | Sequence[Row], file: str | Path, title: str = "") -> None:
    """Write an HTML page, which opens without a network, about a recorded run, or the rows of `compare` or `simulate`.

    Raises:
        UsageError: The rows are of something else, the extra `report` is not installed, or the file cannot be written.
    """
    if isinstance(found, Recording):
        made = run_page.page_of(found.trace, title or "a recorded run")
    elif found and "events" in found[0]:
        made = side_by_side.page_of(list(found), title or f"{found[0]['workers']} workers in virtual time")
    elif found and "speed" in found[0]:
        made = comparison.page_of(list(found), title or f"{found[0]['workers']} workers")
    else:
        raise UsageError("write_report: expected what read_trace, compare or simulate returns, found something else")
    page.write(made, Path(file))
