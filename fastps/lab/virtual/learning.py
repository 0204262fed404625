"""What a recorded run's script learns under each discipline: its losses at equal virtual time, for `fastps advise --train`."""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastps.advice.replay import for_policy, policy_of, simulation_of
from fastps.errors import UsageError
from fastps.job.specs import parse_policy
from fastps.lab.virtual.script import check_workers, command_of, play
from fastps.tracing.file import Trace

Row = dict[str, Any]
_LAST_SHARE = 0.1  # of the virtual time, whose reported losses count


def add_losses(
    rows: Sequence[Row],
    trace: Trace,
    script: str,  # with its arguments, as a shell reads them
    *,
    cores: float = 0.0,
    all_rows: bool = False,  # else only the recorded, the recommended, and the fastest row of each discipline
    tick: Callable[[int, int], None] = lambda done, of: None,
) -> list[Row]:
    """Run the recorded script in virtual time, and return the rows of advice with what it learned.

    `loss` is the mean of the losses reported in the last tenth of the time until `loss_at_s`, the virtual seconds at which the
    first of the runs ends; it is None for a row that was not run. `tick(done, of)` is called after each run.

    Raises UsageError for another script than the recorded one, or one that reports no losses, and what `play` raises.
    """
    command = _command(trace, script)
    simulation = simulation_of(trace, cores)
    check_workers(simulation.workers, "--train")
    runs = rows if all_rows else _fastest_of_each(rows, policy_of(trace).spec)
    policies = [parse_policy(row["sync"]) for row in runs]
    played: dict[str, Row] = {}
    for policy in policies:
        played[policy.spec] = row = play(policy, for_policy(simulation, policy), command).row
        if not row["loss_over_time"]:
            raise UsageError(
                f"--train: expected {command[1]} to report its losses (optimizer.report_loss(loss, samples) before each step),"
                " found none"
            )
        tick(len(played), len(policies))
    until_s = min((row["seconds"] for row in played.values()), default=0.0)
    return [{**row, "loss": _loss_at(played.get(row["sync"]), until_s), "loss_at_s": until_s} for row in rows]


def _command(trace: Trace, script: str) -> list[str]:
    """The command of a script with its arguments. Raises UsageError if it is not what was recorded.

    A trace may be anybody's: what it names is shown, and not run.
    """
    recorded = (trace.header.get("replay") or {}).get("script")
    try:
        arguments = shlex.split(script)
    except ValueError as error:
        raise UsageError(f"--train: expected a script and its arguments, found {script!r}: {error}") from None
    if not recorded:
        raise UsageError("--train: expected a trace of a script, as fastps run --trace records it, found another")
    if not arguments or Path(arguments[0]).name != recorded["name"] or arguments[1:] != recorded["arguments"]:
        wanted = shlex.join([recorded["name"], *map(str, recorded["arguments"])])
        raise UsageError(
            f"--train: expected the recorded script and its arguments, which are run, found {script!r}; give --train"
            f" {shlex.quote(wanted)} if that is what you want to run"
        )
    return command_of(arguments, "--train")


def _fastest_of_each(rows: Sequence[Row], recorded: str) -> list[Row]:
    """Of rows that begin with the fastest: the first of each discipline, the recommended one, and the recorded one."""
    first = {row["sync"].partition(":")[0]: row for row in reversed(rows)}
    return [row for row in rows if row in first.values() or row["recommended"] or row["sync"] == recorded]


def _loss_at(row: Row | None, until_s: float) -> float | None:
    """The mean of the losses in the last tenth of the time until then; where there are none, the last before."""
    if row is None:
        return None
    points: list[tuple[float, float]] = row["loss_over_time"]
    before = [point for point in points if point[0] <= until_s] or points[:1]
    last = [loss for time_s, loss in before if time_s > (1 - _LAST_SHARE) * until_s] or [before[-1][1]]
    return sum(last) / len(last)
