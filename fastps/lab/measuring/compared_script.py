"""A script of the user's own under one discipline, as a row that `fastps compare --script` compares."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastps.errors import UsageError
from fastps.job.policy import Policy
from fastps.processes.launcher import Launcher
from fastps.processes.outcome import how_it_ended
from fastps.tracing.file import TraceError, read
from fastps.tracing.summary import summary_row

Row = dict[str, Any]


def run_script(command: Sequence[str], policy: Policy, workers: int) -> Row:
    """Run a script with so many workers under a discipline: the summary of its trace, and worker 0's last line.

    `seconds` are those of its steps, `wall_seconds` those of the whole launch.

    Raises UsageError for a script that fails, makes no step of fastps, or runs under a discipline of its own.
    """
    with tempfile.TemporaryDirectory(prefix="fastps-compare-") as folder:
        trace = Path(folder, "compare.trace")
        launcher = Launcher(command, workers, sync=policy.spec, trace=trace, silent=True)
        outcome = launcher.run()
        if outcome.ended_by:
            raise KeyboardInterrupt
        if (failed := outcome.first_failure) is not None:
            assert failed.exit_code is not None
            said = f": {failed.errors.tail[-1]}" if failed.errors.tail else ""
            raise UsageError(
                f"expected a script that trains under {policy.spec}, found that worker {failed.rank}"
                f" {how_it_ended(failed.exit_code)}{said}"
            )
        try:
            recorded = read(trace)
        except TraceError:
            raise UsageError("expected a script that makes steps of fastps, found none: does it wrap its optimizer?") from None
    row = summary_row(recorded)
    if row["sync"] != policy.spec:
        raise UsageError(
            f"expected a script that leaves the discipline to --sync, found sync={row['sync']} in the script, where"
            f" {policy.spec} was asked for"
        )
    samples = int(recorded.steps["samples"].sum())
    last_line = outcome.workers[0].last_line.decode("utf-8", "replace").strip()
    rate = {"samples_per_s": samples / row["seconds"]} if samples and row["seconds"] else {}
    return {**row, **rate, "wall_seconds": outcome.seconds, "last_line": last_line}
