"""Faults of the sessions between nodes, to see that the simulated world finds them. Each replaces one method."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastps.errors import UsageError
from fastps.network.messages import Header, Kind
from fastps.network.session import HomeSession, LeafSession, NodeRecord


@dataclass(frozen=True)
class Mutant:
    """A method of a class, and what replaces it."""

    text: str
    owner: type
    method: str
    replacement: Callable[..., Any]


def _resume_late(self: LeafSession, answer: Header) -> None:
    _WELCOME(self, answer)
    self.part += answer.kind == Kind.RESUME and self.is_pending


def _keep_pending(self: LeafSession, answer: Header) -> None:
    step, answered, is_pending = self.step, self.answered, self.is_pending
    _WELCOME(self, answer)
    if is_pending and answer.kind == Kind.WELCOME:
        self.step, self.answered, self.must_fetch = step - answered, 0, False


def _forget_drop(self: LeafSession, answer: Header) -> None:
    dropped = self.dropped
    _WELCOME(self, answer)
    self.dropped = dropped


def _keep_lanes(self: NodeRecord) -> None:
    """Remember the lanes of a lost node as its own."""


def _resume_always(self: NodeRecord, hello: Header) -> Header:
    session = self.session
    assert session is not None
    return Header(Kind.RESUME, step=session.step, part=session.posted % session.parts, lane=hello.lane)


def _nothing(*_: object) -> None:
    """Check nothing."""


_WELCOME = LeafSession.welcome

MUTANTS = {
    "count-repeats": Mutant(
        "a push that is sent again is posted again", HomeSession, "is_missing", lambda self, step, part: True
    ),
    "resume-late": Mutant("a leaf leaves out one part when it resumes", LeafSession, "welcome", _resume_late),
    "keep-pending": Mutant("a leaf sends over a new lane what it began before", LeafSession, "welcome", _keep_pending),
    "forget-drop": Mutant("a leaf does not notice that a push was dropped", LeafSession, "welcome", _forget_drop),
    "know-anyone": Mutant(
        "a restarted agent goes on with its predecessor's lanes", HomeSession, "knows", lambda self, hello: True
    ),
    "take-any-weights": Mutant("a leaf takes weights of another step as its answer", LeafSession, "check_weights", _nothing),
    "resume-always": Mutant(
        "a leaf that has not heard of its new lanes goes on with them", NodeRecord, "answer", _resume_always
    ),
    "keep-lost-lanes": Mutant("a lost node goes on with the lanes that were taken from it", NodeRecord, "lose", _keep_lanes),
}


@contextmanager
def switched_on(name: str | None) -> Iterator[None]:
    """Switch on a mutant for a while. Raises UsageError for an unknown name."""
    if name is None:
        yield
        return
    if name not in MUTANTS:
        raise UsageError(f"--mutant: expected one of {', '.join(MUTANTS)}, found {name!r}")
    mutant = MUTANTS[name]
    real = getattr(mutant.owner, mutant.method)
    setattr(mutant.owner, mutant.method, mutant.replacement)
    try:
        yield
    finally:
        setattr(mutant.owner, mutant.method, real)
