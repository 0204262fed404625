"""A crew: forked processes that wait for orders between measurements, so that several sides can take turns.

Forked, because importing torch in each process would take longer than many a measurement. Refuses to time anything: what an
order returns is each member's own.
"""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from fastps.errors import Error

Order = Callable[[Any], Any]
_context = multiprocessing.get_context("fork")
_ORDER_S = 120.0
_END = "end"


class CrewError(Error):
    """A member of a crew failed, or did not answer in time."""


class Crew:
    """`size` processes; each calls `begin(rank)` for the function that answers its orders. Use as a context manager.

    If the function has an attribute `close`, it is called at the end.
    """

    def __init__(self, size: int, begin: Callable[[int], Order]) -> None:
        pipes = [_context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            _context.Process(target=_serve, args=(rank, begin, theirs), daemon=True) for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pipes:
            theirs.close()

    def call(self, order: object) -> list[Any]:
        """Give every member the order, and return what each answered. Raises CrewError."""
        for connection in self._connections:
            connection.send(order)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers: dict[int, Any] = {}
        while len(answers) < len(self._connections):
            waiting = [pair for pair in enumerate(self._connections) if pair[0] not in answers]
            ready = wait([connection for _, connection in waiting], _ORDER_S)
            if not ready:
                raise CrewError(f"members {[rank for rank, _ in waiting]} of a benchmark did not answer within {_ORDER_S:g} s")
            for rank, connection in waiting:
                if connection in ready:
                    answers[rank] = _answer_of(rank, connection)
        return [answers[rank] for rank in range(len(self._connections))]

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            if error is None and process.is_alive():
                connection.send(_END)
            elif error is not None:
                process.kill()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
            process.close()


def _answer_of(rank: int, connection: Connection) -> Any:
    try:
        failure, answer = connection.recv()
    except EOFError:
        raise CrewError(f"member {rank} of a benchmark died") from None
    if failure is not None:
        raise CrewError(f"member {rank} of a benchmark failed: {failure}")
    return answer


def _serve(rank: int, begin: Callable[[int], Order], connection: Connection) -> None:
    """A member's life."""
    answer: Order | None = None
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
