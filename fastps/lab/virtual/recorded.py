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
from fastps.lab.virtual.driver import LEAVE, RECEIVE, TIMER, Event
from fastps.tracing.file import EVENT_CHANGE, EVENT_LEAVE, EVENT_TIMER, Lines, Trace, TraceError
from fastps.tracing.for_replay import digest_of

_FIRST_COMMIT = 2  # as the scheduler counts them
_KINDS = (RECEIVE, RECEIVE, LEAVE, TIMER)


@dataclass(frozen=True)
class Steps:
    """What one worker pushed, by position; then it left.

    Attributes:
        reads: the version of each shard that the push was computed with.
        timestamps: the version that its descriptor named.
        numbers: the step that it was.
        samples: the CRC-32 of its gradient's sample.
    """

    reads: npt.NDArray[np.int64]
    timestamps: npt.NDArray[np.int64]
    numbers: npt.NDArray[np.int64]
    samples: npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Recorded:
    """One recorded run.

    Attributes:
        about: what the trace's header says for a replay.
        commits: of each shard, in order; an event's `detail` is the position of its push.
        steps: of each worker.
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
        steps = [_steps_of(trace, worker) for worker in range(trace.workers)]
        commits = _commits_of(trace, [len(each.reads) for each in steps])
        checksums = {(int(line["shard"]), int(line["version"])): int(line["checksum"]) for line in trace.checksums}
        header = trace.header
        versions, weights = [int(each) for each in header["versions"]], [int(each) for each in header["weights"]]
        if not len(versions) == len(weights) == len(commits):
            raise ValueError(f"{len(weights)} checksums of {len(commits)} shards")
        about = header["replay"]
        if not {"script", "model", "nonfinite", "threads"} <= set(about) or not about["threads"].isdecimal():
            raise ValueError(f"a replay of {about}")
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
    if "weights" not in header or header["unfinished"] or list(header["recorded"]) != list(range(trace.workers)):
        return (
            "the trace has no checksum of the last weights, because not every worker recorded to its end: record the run again"
        )
    if (trace.events["kind"] == EVENT_CHANGE).any():
        return "a worker died or joined, which cannot be replayed yet"
    try:
        policy = asdict(parse_policy(header["sync"]))
    except PolicyError:
        policy = {}
    if json.loads(json.dumps(policy)) != header["policy"]:
        return f"expected a discipline that this fastps knows, found {header['sync']}"
    return ""


def _steps_of(trace: Trace, worker: int) -> Steps:
    """One worker's pushes. Raises ValueError if one is missing."""
    shards = int(trace.header["shards"])
    inputs = np.sort(trace.inputs[trace.inputs["worker"] == worker], order=["position", "shard"])
    pushes = trace.pushes[(trace.pushes["worker"] == worker) & (trace.pushes["shard"] == 0)]
    pushes = pushes[np.argsort(pushes["position"], kind="stable")]
    count = len(inputs) // shards
    expected = np.repeat(np.arange(count), shards)
    if len(pushes) != count or not (
        np.array_equal(inputs["position"], expected)
        and np.array_equal(inputs["shard"], np.tile(np.arange(shards), count))
        and np.array_equal(pushes["position"], np.arange(count))
    ):
        raise ValueError(f"the pushes of worker {worker} are not one after the other")
    reads = inputs["version"].reshape(count, shards)
    if count and (reads[0].min() < 0 or (np.diff(reads, axis=0) < 0).any()):
        raise ValueError(f"worker {worker} reads older versions later")
    return Steps(reads, pushes["read_version"], pushes["step"], inputs["sample"][::shards])


def _commits_of(trace: Trace, counts: Sequence[int]) -> list[list[list[Event]]]:
    """Each shard's commits. `counts`: the pushes of each worker. Raises ValueError if a commit or an event is missing."""
    events = np.sort(trace.events, order=["shard", "commit", "order"])
    found = []
    for shard in range(int(trace.header["shards"])):
        lines = events[events["shard"] == shard]
        numbers, firsts = np.unique(lines["commit"], return_index=True)
        if not np.array_equal(numbers, np.arange(len(numbers)) + _FIRST_COMMIT):
            missing = next(number for number, have in enumerate(numbers, _FIRST_COMMIT) if number != have)
            raise ValueError(f"commit {missing} of shard {shard} is missing")
        commits = np.split(lines, firsts[1:]) if len(lines) else []
        if commits and int(commits[0]["version"][0]) > len(commits[0]):
            raise ValueError("it begins from a checkpoint, which cannot be replayed yet")
        _check_positions(lines, counts)
        found.append([_commit_of(commit) for commit in commits])
    return found


def _check_positions(lines: Lines, counts: Sequence[int]) -> None:
    """Check that each worker's descriptors come in their order: pushes, and behind them LEAVE."""
    posted = lines[lines["kind"] < EVENT_TIMER]
    if len(posted) and not 0 <= int(posted["worker"].min()) <= int(posted["worker"].max()) < len(counts):
        raise ValueError(f"an event of worker {int(posted['worker'].max())} of {len(counts)}")
    for worker, count in enumerate(counts):
        own = posted[posted["worker"] == worker]
        leaves = own["kind"] == EVENT_LEAVE
        if not np.array_equal(own["position"], np.arange(len(own))) or leaves[:-1].any() or len(own) - leaves.sum() > count:
            raise ValueError(f"the events of worker {worker} are not one after the other")


def _commit_of(lines: Lines) -> list[Event]:
    if not np.array_equal(lines["order"], np.arange(len(lines))):
        raise ValueError(f"an event of commit {int(lines['commit'][0])} is missing")
    return [
        Event(at_ns, version, position, worker if kind < EVENT_TIMER else -1, shard, _KINDS[kind])
        for at_ns, _, position, version, worker, shard, _, kind, _ in lines.tolist()
    ]
