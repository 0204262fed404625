"""fastps.evaluator: start an evaluator beside the training whose script calls it."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]  # typeshed lacks it
from pathlib import Path
from typing import IO, Any, Self

import torch

from fastps.errors import Error, UnsupportedError
from fastps.evaluation.loop import Evaluate, Evaluation, enter_idle_class
from fastps.evaluation.options import EvaluationOptions
from fastps.evaluation.rows import Row, read
from fastps.job import environment
from fastps.processes import handover
from fastps.processes.outcome import how_it_ended
from fastps.processes.worker_environment import inherited
from fastps.system import garbage
from fastps.system.processes import import_path

# A new process, so that no thread or lock of the trainer is in it; it has the caller's sys.path before it imports anything.
_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
from fastps.processes.spawned import main
main()
"""
_OF_A_WORKER = ("FASTPS_RANK", "FASTPS_WORKERS", "RANK", "LOCAL_RANK", "WORLD_SIZE")


class Evaluator:
    """The process of an evaluation; `fastps.evaluator` starts it.

    Attributes:
        process_id: the process.
        file: the file of its rows.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", report: IO[bytes], file: str) -> None:
        self.process_id, self.file = process.pid, file
        self._process, self._report = process, report

    def rows(self) -> list[Row]:
        """The rows that it has written so far."""
        return read(self.file)[0]

    @property
    def best(self) -> Row | None:
        """The row of the best version so far; None before the first, and without a metric."""
        return next((row for row in reversed(self.rows()) if row.get("is_best")), None)

    def close(self) -> None:
        """Let it evaluate the newest version, unless it has, and wait until it has ended. May be called twice.

        Raises the exception that ended it, fastps.Error if it was killed. If this wait is interrupted, it is killed.
        """
        pipe = self._process.stdin
        if pipe is None or pipe.closed:
            return
        with contextlib.suppress(OSError):  # it has ended
            pipe.write(b"\n")  # a child of this process may hold the pipe, so its end alone may come late
            pipe.flush()
        with contextlib.suppress(OSError):
            pipe.close()
        try:
            code = self._process.wait()
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise
        outcome = handover.reported(self._report)
        self._report.close()
        if outcome is None:
            raise Error(f"the evaluator {how_it_ended(code)}: expected it to end with the job; its rows are whole")
        if outcome.error is not None:
            outcome.error.__cause__ = RemoteTraceback(f'\n"""\n{outcome.traceback}"""')
            raise outcome.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        with contextlib.suppress(Exception) if kind is not None else contextlib.nullcontext():  # the first error counts
            self.close()


def evaluator(
    build_model: Callable[[], torch.nn.Module], evaluate: Evaluate, job: str, rows: str | os.PathLike[str], **options: Any
) -> Evaluator:
    """Start a process that evaluates the newest versions of `job`, and writes what it finds into the file `rows`.

    The job is a `fastps.Publisher` or a training whose optimizer fastps wraps, and may start later. No worker waits for the
    process. It ends with the job, with `close`, and with the process that started it, and evaluates the newest version before.

    >>> import fastps, tempfile, torch
    >>> def build_model():
    ...     return torch.nn.Linear(1, 1)
    >>> def evaluate(model):
    ...     return {"weight": model.weight}
    >>> model, folder = build_model(), tempfile.TemporaryDirectory()
    >>> with fastps.Publisher(model, "evaluator-example") as publisher:
    ...     with fastps.evaluator(build_model, evaluate, "evaluator-example", f"{folder.name}/rows.jsonl") as evaluator:
    ...         version = publisher.publish()
    >>> evaluator.rows()[-1]["version"], evaluator.rows()[-1]["weight"] == model.weight.item()
    (1, True)

    Args:
        build_model: makes the job's model, with any weights.
        evaluate: gets the model, in eval mode, with the weights of one version, and returns a dict of numbers by name.
        job: the job's name.
        rows: the file, a line of JSON for each version: `version`, `unix_s`, `seconds`, the publisher's `tag`, the numbers.
        every: evaluate the newest version once it is so many versions ahead of the last (1).
        every_s: begin no evaluation sooner than so many seconds after the one before (0).
        metric: the name of the number that says which version is better.
        mode: "max" or "min": whether more or less of it is better.
        best: a file for the best version's `state_dict()`, as `torch.load` reads it; it is never a part of one.
        patience: after so many evaluations without a better one, ask the training to stop (0: never).
        tensorboard: a folder for TensorBoard's files, which have the version as the step.
        device: where the model is evaluated, such as "cuda:0" ("cpu", without a copy of the weights).
        follow_s: once the job has ended, wait so long for a trainer that takes its name, and go on with that (0).
        idle: run only while no other process wants the core (True).
        resume: go on with the rows that are there, and their best (False: the file begins anew).

    Both functions go to the process as those of `fastps.spawn` do. Raises UsageError for a wrong option or a function that
    cannot be copied, UnsupportedError in virtual time. What the functions raise ends the process, and `close` raises it.
    """
    if environment.is_virtual():
        raise UnsupportedError("an evaluator in virtual time: expected a real run, because versions come at real moments")
    file = os.path.abspath(rows)  # noqa: PTH100  (a link stays one)
    given = EvaluationOptions(rows=file, **options)
    if not given.resume:
        Path(file).unlink(missing_ok=True)  # the caller may look into it at once
    variables = {name: value for name, value in inherited().items() if name not in _OF_A_WORKER}
    report = handover.memory_file("outcome")
    with handover.write(handover.Work(_work, (build_model, evaluate, job, given), None)) as work:
        arguments = [json.dumps(import_path()), "0", str(work.fileno()), str(report.fileno())]
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments],
            env=variables,
            stdin=subprocess.PIPE,
            pass_fds=[work.fileno(), report.fileno()],
            process_group=0,
        )
    return Evaluator(process, report, file)


def _work(
    rank: int,
    build_model: Callable[[], torch.nn.Module],
    evaluate: Evaluate,
    job: str,
    options: EvaluationOptions,
) -> None:
    if options.idle:
        enter_idle_class()
    garbage.freeze()  # the collections at the end would pass over all that was imported
    evaluation = Evaluation(build_model, evaluate, job, options, end=(end := threading.Event()))
    threading.Thread(target=_await_end, args=(end,), daemon=True).start()
    for _ in evaluation.rows():
        pass


def _await_end(end: threading.Event) -> None:
    os.read(0, 1)  # returns once the starter closes, or has ended
    end.set()
