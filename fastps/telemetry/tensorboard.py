"""A running job's figures in TensorBoard's files, written by the launcher: `--tensorboard DIR`.

The workers do nothing for it: a read-only observer looks into the arena about once a second, and once more after the last
worker has ended. Each worker, shard and node is a run of its own in TensorBoard, in a folder below the job's, so that one chart
shows them together. The package `tensorboard` writes the records; it is imported before the workers start.
"""

import io
import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from fastps.errors import Error, UnsupportedError, UsageError
from fastps.membership import discovery
from fastps.store.observer import Look, Observer, observe
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.extras import how_to_install
from fastps.telemetry.scalars import COUNTER, JOB, SCALARS, SHARD, STALENESS, owners_of, updates_of, values_of

logger = logging.getLogger("fastps.telemetry")

TICK_S = 0.05  # how often a launcher calls while it is asked to write
_LEAST_NS, _MOST_NS, _POINTS = 1_000_000_000, 30_000_000_000, 1000  # between two points: a thousandth of the run so far
_PATTERN = "*tfevents*"  # TensorBoard takes files of these names
_file_numbers = itertools.count()


@contextmanager
def written(directory: Path | None, job: Callable[[], str], clock: Clock = SYSTEM_CLOCK) -> Iterator[Callable[[], None] | None]:
    """Write the figures of the launched job `job()` into `directory` while the block runs; yields what to call every TICK_S.

    With None nothing is written, and None is yielded. Raises UnsupportedError without the package, and UsageError for a
    directory that cannot be made.
    """
    if directory is None:
        yield None
        return
    with closing(JobWriter(directory, job, clock)) as writer:
        yield writer.tick


class JobWriter:
    """Follows all arenas of a launched job: its script may make several optimizers, and `sync="auto"` moves to a second arena.

    The first arena's files are in `directory`, or in a folder below it with the job's name if another run's files are there.
    Those of the script's next optimizers are in `optimizer1` and so on below that.
    """

    def __init__(self, directory: Path, job: Callable[[], str], clock: Clock) -> None:
        check_installed()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = error.strerror
            raise UsageError(f"--tensorboard {directory}: expected a folder, or a place for one, found: {found}") from None
        self._directory = directory.resolve()
        self._job = job
        self._clock = clock
        self._folder: Path | None = None
        self._followed: dict[int, _Followed] = {}
        self._began_ns = clock.now_ns()
        self._next_ns = 0
        self._has_failed = False

    def tick(self) -> None:
        """Look for an arena until there is one; then write a point of every arena about once a second, later less often."""
        now_ns = self._clock.now_ns()
        if self._has_failed or (self._followed and now_ns < self._next_ns):
            return
        self._next_ns = now_ns + min(_MOST_NS, max(_LEAST_NS, (now_ns - self._began_ns) // _POINTS))
        with self._ending_at_errors():
            self._find()
            for followed in self._followed.values():
                followed.write()

    def close(self) -> None:
        """Write the last point of every arena, and close the files."""
        if not self._has_failed:
            with self._ending_at_errors():
                for followed in self._followed.values():
                    followed.write()
        for followed in self._followed.values():
            followed.close()
        if not self._followed:
            told = "--tensorboard %s: nothing was written, because no arena was seen of job %s"
            logger.warning(told, self._directory, self._job())

    @contextmanager
    def _ending_at_errors(self) -> Iterator[None]:
        """A full disk ends the writing, and not the training."""
        try:
            yield
        except OSError as error:
            self._has_failed = True
            logger.warning("--tensorboard %s: no more is written: %s", self._directory, error)

    def _find(self) -> None:
        job = self._job()
        for number in discovery.instances_of(job):
            before = self._followed.get(number)
            if before is not None and not before.is_over:
                continue
            with suppress(Error):  # it ended meanwhile, or its first process is just beginning
                observer = observe(f"{job}.{number}" if number else job, timeout_s=0.0, clock=self._clock)
                if before is not None and observer.is_of_arena_of(before.observer):
                    observer.close()
                    continue
                if before is not None:  # the job begins anew
                    before.close()
                self._followed[number] = _Followed(observer, self._folder_of(job, number), self._clock)

    def _folder_of(self, job: str, number: int) -> Path:
        if self._folder is None:
            _, _, node = job.rpartition(".node")
            is_other = node.isdecimal() and node != "0"  # a launcher of another node may write into the same directory
            folder = self._directory / f"node{node}-workers" if is_other else self._directory
            self._folder = folder / job if any(folder.glob(_PATTERN)) else folder
        return self._folder / f"optimizer{number}" if number else self._folder


class _Followed:
    def __init__(self, observer: Observer, folder: Path, clock: Clock) -> None:
        self.observer = observer
        self.is_over = False
        self._folder = folder
        self._clock = clock
        self._files: dict[tuple[str, int], EventFile] = {}
        self._before: Look | None = None

    def write(self) -> None:
        """Write a point, unless nothing has happened since the last. Raises OSError."""
        look = self.observer.look()
        self.is_over = look.over
        if self._before is not None and _progress(self._before) == _progress(look):
            return
        unix_s, step = self._clock.unix_ns() / 1e9, updates_of(look)
        for (owner, number), values in _points(self._before, look).items():
            key = (owner, number)
            if key not in self._files:
                folder = self._folder if owner == JOB else self._folder / f"{owner}{number}"
                self._files[key] = EventFile(folder, unix_s)
            self._files[key].add(values, unix_s, step)
        for file in self._files.values():
            file.flush()
        self._before = look

    def close(self) -> None:
        self.observer.close()
        for file in self._files.values():
            file.close()


def _progress(look: Look) -> list[Any]:
    workers = [(row.steps, row.state, row.folded, row.dropped) for row in look.workers]
    return [workers, [shard.version for shard in look.shards], [(row.steps, row.state, row.folded) for row in look.nodes]]


def _points(before: Look | None, look: Look) -> dict[tuple[str, int], list[Any]]:
    """The values of each owner at this look: those of the table, the growth of its counters, and histograms of staleness."""
    found: dict[tuple[str, int], list[Any]] = {}
    for each, number, value in values_of(look):
        found.setdefault((each.owner, number), []).append(scalar(each.tag, each.help, value))
    for tag, owner, number, value in rates(before, look):
        found.setdefault((owner, number), []).append(scalar(tag, "", value))
    for shard in look.shards:
        if shard.staleness:
            found.setdefault((SHARD, shard.shard), []).append(_histogram(STALENESS.tag, shard.staleness, STALENESS.help))
    return found


def rates(before: Look | None, look: Look) -> Iterator[tuple[str, str, int, float]]:
    """The growth per second of the table's counters between two looks: (tag, owner, its number, value).

    Figures of other nodes come about twice a second, and their time is the time between those.
    """
    if before is None:
        return
    for scalar in SCALARS:
        if not scalar.rate or scalar.kind != COUNTER:
            continue
        old = dict(owners_of(before, scalar.owner))
        for number, row in owners_of(look, scalar.owner):
            earlier = old.get(number)
            if earlier is None:
                continue
            begin_ns, end_ns = (getattr(each, "heard_ns", at) for each, at in ((earlier, before.seen_ns), (row, look.seen_ns)))
            now, then = scalar.value(row), scalar.value(earlier)
            if now is not None and then is not None and end_ns > begin_ns > 0:
                yield f"{scalar.owner}/{scalar.rate}", scalar.owner, number, max(0.0, now - then) * 1e9 / (end_ns - begin_ns)


class EventFile:
    """One of TensorBoard's files, in a folder of its own: records are whole after `flush`. Raises OSError."""

    def __init__(self, folder: Path, unix_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(unix_s):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        self._file = (folder / name).open("wb", buffering=io.DEFAULT_BUFFER_SIZE)
        self._event = Event
        self._described: set[str] = set()
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=unix_s, file_version="brain.Event:2"))

    def add(self, values: Sequence[Any], unix_s: float, step: int) -> None:
        """Write values of one moment."""
        event = self._event(wall_time=unix_s, step=step)
        event.summary.value.extend(values)
        for value in event.summary.value:
            if value.tag in self._described:
                value.ClearField("metadata")  # TensorBoard reads the first
            self._described.add(value.tag)
        self._write(event)

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def flush(self) -> None:
        """Make what was written visible to TensorBoard."""
        self._records.flush()

    def close(self) -> None:
        """Close the file; what a full disk did not take is lost, as the log said."""
        with suppress(OSError):
            self._records.close()


def _value(tag: str, plugin: str, text: str, **value: Any) -> Any:
    """A value that a plugin of TensorBoard shows. It keeps 32-bit floats, so counts are exact up to 16,777,216."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata

    data = SummaryMetadata.PluginData(plugin_name=plugin)
    return Summary.Value(tag=tag, metadata=SummaryMetadata(summary_description=text, plugin_data=data), **value)


def scalar(tag: str, text: str, value: float) -> Any:
    """A number of a record, which TensorBoard draws over the steps; `text` describes it."""
    return _value(tag, "scalars", text, simple_value=value)


def _histogram(tag: str, counts: Sequence[tuple[int, int]], text: str) -> Any:
    """A bucket for each whole number from the least to the greatest that occurred, and half a number to both sides."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    count_of = dict(counts)
    least, greatest = min(count_of), max(count_of)
    numbers = range(least, greatest + 1)
    histogram = HistogramProto(
        min=least - 0.5,
        max=greatest + 0.5,
        num=sum(count_of.values()),
        sum=sum(number * count for number, count in counts),
        sum_squares=sum(number * number * count for number, count in counts),
        bucket_limit=[number + 0.5 for number in numbers],
        bucket=[count_of.get(number, 0) for number in numbers],
    )
    return _value(tag, "histograms", text, histo=histogram)


def check_installed() -> None:
    """Import the package, before a job starts. Raises UnsupportedError if it is missing."""
    try:
        import tensorboard.summary.writer.record_writer  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            f"--tensorboard: expected the package tensorboard, which is not installed: {how_to_install('tensorboard')}"
        ) from None
