"""A crew: processes that wait for commands between measurements, so that several sides can alternate.

Most crews are forked, because importing torch in each process takes longer than many measurements; members with a launcher of
their own connect back. Members time themselves: a command returns their own measurements.
"""

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Self

from fastps.errors import Error
from fastps.system.interrupts import ignored_by_children
from fastps.system.processes import ask_to_die_with_parent

Command = Callable[[Any], Any]
_COMMAND_S = 120.0
_END_S = 30.0
_END = "end"


class CrewError(Error):
    """A member of a crew failed, or did not answer in time."""


class Crew:
    """Members behind connections, as a context manager that ends them; subclasses start and end the processes."""

    def __init__(self, connections: Sequence["Connection[Any, Any]"]) -> None:
        self._connections = list(connections)

    def call(self, order: object) -> list[Any]:
        """Send every member the command and return their answers. Raises CrewError."""
        for connection in self._connections:
            connection.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [pair for pair in enumerate(self._connections) if pair[0] not in answers]
            ready = wait([connection for _, connection in waiting], _COMMAND_S)
            if not ready:
                raise CrewError(
                    f"members {[rank for rank, _ in waiting]} of a benchmark did not answer within {_COMMAND_S:g} s"
                )
            for rank, connection in waiting:
                if connection in ready:
                    answers[rank] = _answer_of(rank, connection)
        return [answers[rank] for rank in range(len(self._connections))]

    def _end(self, killed: bool) -> None:
        """Wait until the members have ended; `killed`: one failed, so the others may wait for it forever."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(_END)
            connection.close()
        self._end(killed=error is not None)


class ForkedCrew(Crew):
    """`size` forked processes; each calls `begin(rank)` for the function that answers its commands.

    If the function has an attribute `close`, it is called at the end. With `paused` the processes are stopped between commands:
    threads that poll all the time would take the cores from the other sides. `method`: another of multiprocessing's ways to
    start them.
    """

    def __init__(self, size: int, begin: Callable[[int], Command], *, paused: bool = False, method: str = "fork") -> None:
        self._paused = paused
        context: Any = multiprocessing.get_context(method)
        pipes = [context.Pipe() for _ in range(size)]
        super().__init__([ours for ours, _ in pipes])
        self._processes: list[multiprocessing.process.BaseProcess] = [
            context.Process(target=_live, args=(os.getpid(), rank, begin, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        with ignored_by_children():
            for process in self._processes:
                process.start()
        for _, theirs in pipes:
            theirs.close()

    def call(self, order: object) -> list[Any]:
        """Send every member the command and return their answers. Raises CrewError."""
        self._signal(signal.SIGCONT)
        answers = super().call(order)
        self._signal(signal.SIGSTOP)
        return answers

    def _signal(self, number: signal.Signals) -> None:
        if self._paused:
            for process in self._processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, number)

    def _end(self, killed: bool) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            if killed:
                process.kill()
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()


def _answer_of(rank: int, connection: "Connection[Any, Any]") -> Any:
    try:
        failure, answer = connection.recv()
    except EOFError:
        raise CrewError(f"member {rank} of a benchmark died") from None
    if failure is not None:
        raise CrewError(f"member {rank} of a benchmark failed: {failure}")
    return answer


def _live(parent: int, rank: int, begin: Callable[[int], Command], connection: "Connection[Any, Any]") -> None:
    ask_to_die_with_parent(parent)  # needed while it is stopped, or while another fork keeps its connection open
    serve(rank, begin, connection)


def serve(rank: int, begin: Callable[[int], Command], connection: "Connection[Any, Any]") -> None:
    """Answer commands until the end, or until the sender is gone."""
    answer: Command | None = None
    with contextlib.suppress(EOFError):
        while (order := connection.recv()) != _END:
            try:
                if answer is None:
                    answer = begin(rank)
                connection.send((None, answer(order)))
            except Exception as error:
                connection.send((f"{type(error).__name__}: {error} {traceback.format_exc(limit=-2)}", None))
                return
        close = getattr(answer, "close", None)
        if close is not None:
            close()
