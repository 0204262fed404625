"""A launcher begins again after losses that a restart heals, and after nothing else."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from fastps.errors import AttachError, Error, NodeLostError, UsageError
from fastps.network.place import End, Place
from fastps.processes.nodes import NodeOptions
from fastps.processes.options import JobOptions
from fastps.processes.outcome import Outcome
from fastps.processes.retries import with_retries
from fastps.system.clock import Clock

pytestmark = pytest.mark.unit

PLACE = Place(1, 2, 4, "first", 0)
LOST = End(75, "node 1: its agent was killed")


class _Clock(Clock):
    """Notes how long it is slept, and does not sleep."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def sleep_ns(self, duration_ns: int) -> None:
        self.slept_s.append(duration_ns / 1e9)


class _Launches:
    """Plays launches that end so; notes with which options each began."""

    def __init__(self, *ends: End | Error, place: Place | None = PLACE) -> None:
        self._ends, self._place = list(ends), place
        self.begun: list[tuple[JobOptions, NodeOptions]] = []

    def __call__(self, options: JobOptions, nodes: NodeOptions) -> Outcome:
        self.begun.append((options, nodes))
        end = self._ends.pop(0)
        if isinstance(end, Error):
            raise end
        return Outcome([], None, end.code - 128 if end.code > 128 else 0, 0.0, 0, end=end, place=self._place)


def _run(
    launches: _Launches, retries: int, options: JobOptions | None = None, found: Sequence[str] = ()
) -> tuple[Outcome, list[float]]:
    """The last outcome and the pauses; `found` has the newest checkpoint after each launch."""
    clock, names = _Clock(), iter(found)
    nodes = NodeOptions(2, "10.0.0.1:29400", retries=retries)
    outcome = with_retries(launches, options or JobOptions(), nodes, lambda folder: next(names, ""), clock)
    return outcome, clock.slept_s


def test_a_lost_job_is_launched_again_with_its_number_until_it_ends_well(caplog: pytest.LogCaptureFixture) -> None:
    launches = _Launches(LOST, NodeLostError("no rendezvous answered", 0), End(0))
    with caplog.at_level(logging.WARNING, "fastps.launch"):
        outcome, slept_s = _run(launches, 5)
    assert outcome.exit_code == 0
    assert slept_s == [1.0, 2.0]
    assert [(nodes.rank, nodes.earlier) for _, nodes in launches.begun] == [("auto", ""), ("1", "first"), ("1", "first")]
    assert "node 1: its agent was killed; all nodes meet again in 1 s (retry 1 of 5) and begin anew" in caplog.text
    assert "no rendezvous answered; all nodes meet again in 2 s (retry 2 of 5)" in caplog.text


@pytest.mark.parametrize("end", [End(0), End(1, "node 1: OSError"), End(130, "it was ended by SIGINT"), End(143, "by SIGTERM")])
def test_a_job_that_ends_otherwise_is_not_launched_again(end: End) -> None:
    launches = _Launches(end)
    outcome, slept_s = _run(launches, 5)
    assert (outcome.exit_code, slept_s, len(launches.begun)) == (end.code, [], 1)


def test_other_runs_checkpoints_are_not_taken_for_those_of_a_lost_attempt() -> None:
    with pytest.raises(UsageError, match="expected no --overwrite"):
        NodeOptions(2, "10.0.0.1:29400", retries=1).check_beside(JobOptions(checkpoint="a", overwrite=True))


@pytest.mark.parametrize("retries", [-1, 1_000_001])
def test_a_number_of_retries_out_of_range_is_refused(retries: int) -> None:
    with pytest.raises(UsageError, match="--retries: expected 0 to 1,000,000"):
        NodeOptions(2, "10.0.0.1:29400", retries=retries)


def test_retries_are_bounded() -> None:
    outcome, slept_s = _run(_Launches(*[LOST] * 9), 8)
    assert outcome.exit_code == 75
    assert slept_s == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    with pytest.raises(NodeLostError, match="the last"):
        _run(_Launches(LOST, NodeLostError("the last", 0)), 1)


def test_an_error_of_the_meeting_that_no_restart_heals_ends_all() -> None:
    launches = _Launches(LOST, AttachError("a firewall"))
    with pytest.raises(AttachError, match="a firewall"):
        _run(launches, 5)
    assert len(launches.begun) == 2


def test_each_launch_goes_on_from_the_newest_checkpoint_and_progress_makes_the_pause_short_again(tmp_path: Path) -> None:
    launches = _Launches(LOST, LOST, LOST, LOST, End(0))
    options = JobOptions(checkpoint=str(tmp_path), resume="given")
    _, slept_s = _run(launches, 9, options, ["", "a/checkpoint-1", "a/checkpoint-1", "a/checkpoint-2"])
    assert [each.resume for each, _ in launches.begun] == ["given", "given", *["a/checkpoint-1"] * 2, "a/checkpoint-2"]
    assert slept_s == [1.0, 1.0, 2.0, 1.0]
