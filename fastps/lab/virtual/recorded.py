"""A recorded run as a replay needs it: each shard's commits in order, and what each worker's steps read and pushed.

Any file may be given. What is found in it is checked here, once: the replay follows the numbers.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastps.errors import PolicyError, UsageError
from fastps.job.specs import parse_policy
from fastps.lab.virtual.driver import DEATH, JOIN, LEAVE, RECEIVE, TIMER, Event
from fastps.tracing.file import (
    DROPPED,
    EVENT_DEATH,
    EVENT_EXPULSION,
    EVENT_JOIN,
    EVENT_LEAVE,
    EVENT_TIMER,
    Lines,
    Trace,
    TraceError,
)
from fastps.tracing.for_replay import CHECKSUM_OF_GRADIENTS, digest_of

_FIRST_COMMIT = 2  # as the scheduler counts them
_NEVER = 1 << 62
_MOST_THREADS = 4096
_KINDS = (RECEIVE, RECEIVE, LEAVE, TIMER, DEATH, DEATH, JOIN)


@dataclass(frozen=True)
class Owner:
    """One of the workers that a lane had, one after the other: the positions of its pushes, and whether it died behind them."""

    first: int
    end: int
    died: bool


@dataclass(frozen=True)
class Steps:
    """What one lane's workers pushed, by position. A position at which a worker left has what the one before it has.

    Attributes:
        reads: the version of each shard that the push was computed with.
        timestamps: the version that its descriptor named.
        numbers: the step that it was.
        samples: the checksum of its gradient.
        dropped: whether a shard dropped it.
        owners: the lane's workers, in order.
        joins: whether the first of them joined a job that had begun without it.
    """

    reads: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    samples: npt.NDArray[np.uint32]
    dropped: npt.NDArray[np.bool_]
    owners: list[Owner]
    joins: bool = False

    def positions(self, step: int) -> list[int]:
        """Where the lane's workers pushed a step."""
        return [at for owner in self.owners for at in range(owner.first, owner.end) if self.numbers[at] == step]


@dataclass(frozen=True)
class Recorded:
    """One recorded run.

    Attributes:
        about: what the trace's header says for a replay.
        commits: of each shard, in order; an event's `detail` is the position of its push.
        steps: of each lane.
        checksums: of weights, by shard and version.
        versions, weights: the last version of each shard, and its checksum.
    """

    sync: str
    about: Mapping[str, Any]
    commits: list[list[list[Event]]]
    steps: list[Steps]
    checksums: dict[tuple[int, int], int]
    versions: Sequence[int]
    weights: Sequence[int]

    @property
    def shards(self) -> int:
        """Shards of the job."""
        return len(self.commits)

    @property
    def workers(self) -> int:
        """Workers with which the job began."""
        return sum(not each.joins for each in self.steps)

    @property
    def joined(self) -> int:
        """Workers that joined later."""
        return sum(len(each.owners) for each in self.steps) - self.workers

    def check_command(self, command: Sequence[str]) -> str:
        """Return a hint for a difference if the script's text has changed. Raises UsageError for other arguments."""
        script = self.about["script"]
        if list(command[2:]) != script["arguments"]:
            raise UsageError(
                f"expected the arguments that the run was recorded with ({' '.join(script['arguments']) or 'none'}), found"
                f" {' '.join(command[2:]) or 'none'}"
            )
        return (
            "" if digest_of(Path(command[1])) == script["digest"] else f", or {command[1]} is not the recorded {script['name']}"
        )


def recorded_of(trace: Trace, file: Path) -> Recorded:
    """Read what a replay needs. Raises UsageError for a run that cannot be replayed, and TraceError for a damaged trace."""
    if reason := _reason_against(trace):
        raise UsageError(f"{file}: {reason}")
    try:
        commits = _commits_of(trace)
        steps = [_steps_of(trace, worker) for worker in range(trace.workers)]
        checksums = {(int(line["shard"]), int(line["version"])): int(line["checksum"]) for line in trace.checksums}
        header = trace.header
        versions, weights = [int(each) for each in header["versions"]], [int(each) for each in header["weights"]]
        if not len(versions) == len(weights) == len(commits):
            raise ValueError(f"{len(weights)} checksums of {len(commits)} shards")
        about = header["replay"]
        if not {"script", "model", "nonfinite", "threads"} <= set(about) or not about["threads"].isdecimal():
            raise ValueError(f"a replay of {about}")
        if not 0 < int(about.get("fold_threads", 1)) <= _MOST_THREADS:
            raise ValueError(f"{about['fold_threads']} threads")
        return Recorded(header["sync"], about, commits, steps, checksums, versions, weights)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise TraceError(f"the trace {file} is damaged: {error}; record the run again") from None


def _reason_against(trace: Trace) -> str:
    """Why a run cannot be replayed; "" if it can."""
    header = trace.header
    about = header.get("replay")
    if about is None:
        return (
            f"recorded by fastps {header.get('version', '?')}, which did not record the order of commits: record the run again"
        )
    if about.get("against"):
        return f"a job {about['against']} cannot be replayed yet"
    if about.get("gradients") != CHECKSUM_OF_GRADIENTS:
        return (
            f"recorded by fastps {header.get('version', '?')}, whose checksums of gradients were others: record the run again"
        )
    if "weights" not in header or list(header["recorded"]) != list(range(trace.workers)):
        return (
            "the trace has no checksum of the last weights, because not every worker recorded to its end: record the run again"
        )
    if (trace.events["worker"][trace.events["kind"] >= EVENT_DEATH] < 0).any():
        return f"recorded by fastps {header.get('version', '?')}, which did not record who died or joined: record the run again"
    if (trace.events["kind"] == EVENT_EXPULSION).any():
        return (
            "a worker was expelled because its memory was damaged, and what it had posted is not known: it cannot be replayed"
        )
    try:
        policy = asdict(parse_policy(header["sync"]))
    except PolicyError:
        policy = {}
    if json.loads(json.dumps(policy)) != header["policy"]:
        return f"expected a discipline that this fastps knows, found {header['sync']}"
    return ""


def _steps_of(trace: Trace, worker: int) -> Steps:
    """One lane's pushes. Raises ValueError if one is missing."""
    shards = int(trace.header["shards"])
    owners, joins = _owners_of(trace, worker)
    inputs = np.sort(trace.inputs[trace.inputs["worker"] == worker], order=["position", "shard"])
    pushed = np.concatenate([np.arange(owner.first, owner.end) for owner in owners]) if owners else np.arange(0)
    inputs = inputs[np.isin(inputs["position"], pushed)]
    if not (
        np.array_equal(inputs["position"], np.repeat(pushed, shards))
        and np.array_equal(inputs["shard"], np.tile(np.arange(shards), len(pushed)))
    ):
        raise ValueError(f"what the pushes of worker {worker} were computed with is missing")
    count = int(pushed[-1]) + 1 if len(pushed) else 0
    places = np.maximum(np.searchsorted(pushed, np.arange(count), "right") - 1, 0)  # the last push up to each position
    reads = inputs["version"].reshape(-1, shards)[places]
    if count and (reads[0].min() < 0 or (np.diff(reads, axis=0) < 0).any()):
        raise ValueError(f"worker {worker} reads older versions later")
    pushes = trace.pushes[(trace.pushes["worker"] == worker) & (trace.pushes["shard"] == 0)]
    pushes = pushes[(pushes["position"] >= 0) & (pushes["position"] < count)]
    dropped = np.isin(np.arange(count), trace.pushes["position"][(trace.pushes["worker"] == worker) & _is_dropped(trace)])
    numbers = np.full(count, -1)
    numbers[pushes["position"]] = pushes["step"]
    for owner in owners:  # a lost worker has no record of its last steps
        for at in range(owner.first, owner.end):
            if numbers[at] < 0:
                numbers[at] = numbers[at - 1] + 1 if at > owner.first else 0
    timestamps, samples = (inputs[name][::shards][places] for name in ("timestamp", "sample"))
    return Steps(reads, timestamps, numbers, samples, dropped, owners, joins)


def _is_dropped(trace: Trace) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = trace.pushes["fate"] == DROPPED
    return found


def _owners_of(trace: Trace, worker: int) -> tuple[list[Owner], bool]:
    """The workers that a lane had, and whether even the first one joined later. Raises ValueError if an event is missing."""
    events = np.sort(trace.events[trace.events["worker"] == worker], order=["shard", "commit", "order"])
    is_late = worker >= int(trace.header["replay"].get("workers") or trace.workers)
    found: list[list[int]] = []
    deaths: set[int] = set()
    for shard in range(int(trace.header["shards"])):
        lines = events[events["shard"] == shard]
        _check_positions(lines, worker)
        changes = lines[(lines["kind"] == EVENT_JOIN) | (lines["kind"] == EVENT_DEATH)]
        joins = np.flatnonzero(changes["kind"] == EVENT_JOIN)
        firsts = [*([] if is_late else [0]), *changes["position"][joins].tolist()]
        if shard and firsts != found[0]:
            raise ValueError(f"worker {worker} ended while it joined, which cannot be replayed")
        found.append(firsts)
        deaths |= set((np.searchsorted(joins, np.flatnonzero(changes["kind"] == EVENT_DEATH)) - is_late).tolist())
    ends = [*found[0][1:], _NEVER]
    parts = enumerate(zip(found[0], ends, strict=False))
    return [_owner_of(trace, events, first, end, number in deaths) for number, (first, end) in parts], is_late


def _owner_of(trace: Trace, events: Lines, first: int, next_first: int, died: bool) -> Owner:
    """The owner of a lane whose descriptors are those from `first` on and before `next_first`. Raises ValueError."""
    own = events[(events["kind"] < EVENT_TIMER) & (events["position"] >= first) & (events["position"] < next_first)]
    left = own["position"][own["kind"] == EVENT_LEAVE]
    if len(left):
        end = int(left[0])
    elif next_first < _NEVER:
        end = next_first
    elif died:
        end = int(own["position"].max(initial=first - 1)) + 1
    else:  # what no combiner had taken when the run ended is there, too
        of_lane = trace.inputs["worker"] == (events["worker"][0] if len(events) else -1)
        end = int(trace.inputs["position"][of_lane].max(initial=first - 1)) + 1
    if end > len(trace.inputs) + len(events):  # positions are one after the other
        raise ValueError(f"a push at position {end - 1}, and {len(trace.inputs)} records of what pushes were computed with")
    if end < first or (next_first < _NEVER and end not in (next_first, next_first - 1)):
        raise ValueError(f"the events of worker {int(events['worker'][0])} are not one after the other")
    return Owner(first, end, died and not len(left))


def _check_positions(lines: Lines, worker: int) -> None:
    """Check that a lane's descriptors come one after the other in a shard, and that each change names the next one."""
    is_posted = lines["kind"] < EVENT_TIMER
    if not np.array_equal(lines["position"], np.cumsum(is_posted) - is_posted):
        raise ValueError(f"the events of worker {worker} are not one after the other")


def _commits_of(trace: Trace) -> list[list[list[Event]]]:
    """Each shard's commits. Raises UsageError if a commit is missing, and ValueError if an event is."""
    events = np.sort(trace.events, order=["shard", "commit", "order"])
    owned = events[events["kind"] != EVENT_TIMER]
    if len(owned) and not 0 <= int(owned["worker"].min()) <= int(owned["worker"].max()) < trace.workers:
        raise ValueError(f"an event of worker {int(owned['worker'].max())} of {trace.workers}")
    found = []
    for shard in range(int(trace.header["shards"])):
        lines = events[events["shard"] == shard]
        numbers, firsts = np.unique(lines["commit"], return_index=True)
        if not np.array_equal(numbers, np.arange(len(numbers)) + _FIRST_COMMIT):
            missing = next(number for number, have in enumerate(numbers, _FIRST_COMMIT) if number != have)
            raise UsageError(
                f"commit {missing} of shard {shard} has no record: the script changed weights or the optimizer's state between"
                " steps (replace_weights, load_state_dict, optimizer.state), which cannot be replayed yet, or a worker was"
                " killed before it could record it"
            )
        commits = np.split(lines, firsts[1:]) if len(lines) else []
        if commits and int(commits[0]["version"][0]) > len(commits[0]):
            raise ValueError("it begins from a checkpoint, which cannot be replayed yet")
        found.append([_commit_of(commit) for commit in commits])
    return found


def _commit_of(lines: Lines) -> list[Event]:
    if not np.array_equal(lines["order"], np.arange(len(lines))):
        raise ValueError(f"an event of commit {int(lines['commit'][0])} is missing")
    return [
        Event(at_ns, version, position, worker, shard, _KINDS[kind])
        for at_ns, _, position, version, worker, shard, _, kind, _ in lines.tolist()
    ]
