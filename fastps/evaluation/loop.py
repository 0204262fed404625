"""The loop of an evaluator: wait for a version, show it in a model, call the user's function, write what it returns."""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from fastps.errors import AttachError, TimeoutExceededError, UsageError
from fastps.evaluation.best import Best
from fastps.evaluation.options import EvaluationOptions
from fastps.evaluation.rows import OWN, Row, RowsFile
from fastps.job import limits
from fastps.membership import discovery
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.telemetry.tensorboard import EventFile, check_installed, scalar
from fastps.torch.reader import Reader
from fastps.torch.reader import reader as open_reader

logger = logging.getLogger("fastps.evaluation")

Evaluate = Callable[[torch.nn.Module], dict[str, Any]]
_TOLD_S = 1.0  # the wait for a job after which the log says so
_LOOK_S = 0.2  # so often a wait looks whether the job has ended, and whether this evaluation shall end


class Evaluation:
    """Evaluates versions of a job until it ends, and then its last one.

    Args:
        build_model: makes the job's model, with any weights.
        evaluate: gets the model, in eval mode, and returns a dict of numbers by name.
        job: the job's name.
        options: see `fastps.evaluator`.
        end: once it is set, the newest version is evaluated, and that is the end.
    """

    def __init__(
        self,
        build_model: Callable[[], torch.nn.Module],
        evaluate: Evaluate,
        job: str,
        options: EvaluationOptions,
        *,
        end: threading.Event | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.options, self.best = options, Best(options, [])
        self._build_model, self._evaluate, self._job = build_model, evaluate, job
        self._end, self._clock = end or threading.Event(), clock
        self._version = -1  # that was evaluated last
        self._began_ns = 0  # of the last evaluation
        self._alive_ns = 0  # when the job was last seen to run, or its last version was evaluated

    def rows(self) -> Iterator[Row]:
        """Evaluate, and yield each row once it is written.

        Raises what `fastps.reader`, its `update` and the two functions raise, UsageError for a result that is no dict of
        numbers or a file that cannot be written.
        """
        given = self.options
        with contextlib.ExitStack() as stack:
            events = stack.enter_context(contextlib.closing(_Events(given.tensorboard))) if given.tensorboard else None
            file = stack.enter_context(contextlib.closing(RowsFile(given.rows, resume=given.resume))) if given.rows else None
            self.best = Best(given, file.found if file else [])
            model = self._build_model()
            if not isinstance(model, torch.nn.Module):
                raise UsageError(f"build_model(): expected a torch.nn.Module, found {type(model).__name__}; return the model")
            model.to(given.device)
            reader = self._open()
            if reader is None:
                return
            stack.enter_context(reader)
            is_first = True
            while is_first or self._await_next(reader):
                is_first = False
                row = self._row(reader, model)
                if self.best.take(row, model):
                    reader.ask_to_stop()
                    row["is_stop_asked"] = True
                if file:
                    file.add(row)
                if events:
                    events.add(row)
                yield row

    def _open(self) -> Reader | None:
        """Open a reader, once the job runs; None if this evaluation shall end before. Raises AttachError as `fastps.reader`."""
        began_ns, timeout_s, is_told = self._clock.now_ns(), limits.timeout_s(), False
        while True:
            is_last = self._end.is_set()
            try:
                with discovery.find_described(self._job, _LOOK_S, self._clock)[0]:
                    break
            except AttachError as error:
                waited_s = (self._clock.now_ns() - began_ns) / 1e9
                if waited_s >= timeout_s:
                    raise
                if is_last:
                    logger.warning("nothing was evaluated: %s", error)
                    return None
                if waited_s >= _TOLD_S and not is_told:
                    is_told = True
                    logger.warning("this evaluator waits up to %g s: %s", timeout_s, error)
        # The timeout is also that of the first update, which waits for a push with buffers.
        return open_reader(self._job, timeout_s, self._clock, follow=self.options.follow_s > 0)

    def _row(self, reader: Reader, model: torch.nn.Module) -> Row:
        self._began_ns = self._clock.now_ns()
        self._version = reader.update(model, copy=self.options.device != "cpu")
        tag = reader.tag
        found = _numbers(self._evaluate(model.eval()))
        self._alive_ns = now_ns = self._clock.now_ns()
        row: Row = {"version": self._version, "unix_s": self._clock.unix_ns() / 1e9, "seconds": (now_ns - self._began_ns) / 1e9}
        return row | ({"tag": tag} if tag else {}) | found

    def _await_next(self, reader: Reader) -> bool:
        """Wait until there is a version to evaluate; False at the end. The last version of a job is always one."""
        due_ns = self._began_ns + int(self.options.every_s * 1e9)
        while True:
            read = reader.version
            if read != self._version:  # the reader has followed, to a job that has other weights
                return True
            wanted = read + self.options.every
            rest_s = (due_ns - self._clock.now_ns()) / 1e9
            if reader.newest >= wanted and rest_s <= 0:
                return True
            if self._end.is_set():
                return reader.is_behind
            if reader.over:
                if reader.is_behind:
                    return True
                if self._clock.now_ns() - self._alive_ns >= self.options.follow_s * 1e9:
                    return False
            else:
                self._alive_ns = self._clock.now_ns()
            if reader.newest >= wanted:
                self._end.wait(min(rest_s, _LOOK_S))
            else:
                with contextlib.suppress(TimeoutExceededError):
                    reader.wait(wanted, _LOOK_S)


def _numbers(found: Any) -> dict[str, float]:
    """What `evaluate()` returned, as Python's numbers. Raises UsageError."""
    if not isinstance(found, dict):
        raise UsageError(f"evaluate(): expected a dict of numbers by name, found {type(found).__name__}")
    numbers = {}
    for name, value in found.items():
        number = value.item() if getattr(value, "shape", None) == () or getattr(value, "numel", lambda: 0)() == 1 else value
        if not isinstance(name, str) or name in OWN or not isinstance(number, int | float):
            raise UsageError(
                f"evaluate(): expected numbers by name, other names than {', '.join(OWN)}; found {name!r}:"
                f" {type(value).__name__}"
            )
        numbers[name] = number
    return numbers


class _Events:
    """Metrics for TensorBoard, as a run of its own named "evaluation". The step is the version."""

    def __init__(self, folder: str) -> None:
        check_installed()
        self._folder = Path(folder) / "evaluation"
        self._file: EventFile | None = None

    def add(self, row: Row) -> None:
        """Write a row. Raises OSError."""
        self._file = self._file or EventFile(self._folder, row["unix_s"])
        values = [scalar(name, "", float(value)) for name, value in row.items() if name not in OWN]
        self._file.add(values, row["unix_s"], row["version"])
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def enter_idle_class() -> None:
    """Let this process run only while no other wants its core (SCHED_IDLE), with all threads and children that it makes."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError as error:
        logger.warning("this evaluator takes its share of the cores, because it cannot be of the class SCHED_IDLE: %s", error)
