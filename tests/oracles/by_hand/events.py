"""The vocabulary of sequences worked out by hand: events with their answers, and the oracle that a sequence tests."""

from dataclasses import dataclass, field

from tests.oracles.table import Play, play


@dataclass(frozen=True)
class Event:
    """One call with its arguments, its answer (folded, granted), and the next timer's deadline after it."""

    kind: str
    arguments: tuple[int, ...]
    folded: list[int]
    granted: list[int]
    due_ns: int | None


def push(
    worker: int, now_ns: int, timestamp: int, folded: list[int], granted: list[int], due: int | None = None, batch: int = 8
) -> Event:
    return Event("push", (worker, now_ns, timestamp, batch), folded, granted, due)


def leave(worker: int, now_ns: int, folded: list[int], granted: list[int], due: int | None = None) -> Event:
    return Event("leave", (worker, now_ns), folded, granted, due)


def join(worker: int, now_ns: int, granted: list[int], due: int | None = None) -> Event:
    return Event("join", (worker, now_ns), [], granted, due)


def fire(folded: list[int], granted: list[int], due: int | None = None) -> Event:
    return Event("fire", (), folded, granted, due)


@dataclass(frozen=True)
class Sequence:
    """Events of one server, and the server's state after them. `oracle` is the name of the oracle's module."""

    name: str
    oracle: str
    workers: int
    spec: str
    events: list[Event]
    version: int
    dropped: dict[int, int] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)

    def played(self) -> Play:
        return play(self.spec, self.oracle)
