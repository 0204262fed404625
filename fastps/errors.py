"""Every error of fastps, and the one place where outcomes of the compiled core become exceptions.

Each message is one sentence: what was expected, what was found, what to do. Refuses to hold policy: who raises what, and when,
is decided where it happens.
"""

from typing import Any


class Error(Exception):
    """Base of all named errors of fastps; its text is meant for people. Survives pickle and copy, with its attributes.

    >>> import copy, pickle
    >>> pickle.loads(pickle.dumps(WorkerDiedError("worker 3 died", 3))).worker
    3
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[Error], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Error:
    """An error without its constructor, which may take more than its arguments."""
    error = kind.__new__(kind)
    error.args = arguments
    error.__dict__.update(attributes)
    return error


class PolicyError(Error, ValueError):
    """A synchronization spec that no discipline accepts."""


class LayoutError(Error, ValueError):
    """Workers of one job describe different models, rules or disciplines."""


class UnsupportedError(Error, TypeError):
    """A tensor, optimizer or option that fastps does not handle."""


class ArenaError(Error):
    """The arena cannot be made or mapped: too little memory, or memory that is not ours."""


class AttachError(Error):
    """A worker cannot join the job."""


class UsageError(Error, RuntimeError):
    """A call at the wrong moment, or in the wrong process."""


class ParameterChangedError(Error, RuntimeError):
    """Somebody wrote to a parameter outside of step()."""


class WorkerDiedError(Error):
    """Another worker of the job ended without leaving in good order."""

    def __init__(self, message: str, worker: int) -> None:
        super().__init__(message)
        self.worker = worker


class NonFiniteGradientError(Error, ArithmeticError):
    """A worker pushed a gradient that is not finite, or made the weights so; it was not folded."""

    def __init__(self, message: str, worker: int) -> None:
        super().__init__(message)
        self.worker = worker


class CheckpointError(Error, ValueError):
    """A checkpoint that cannot be read, is damaged, or is of another job."""


class TimeoutExceededError(Error, TimeoutError):
    """A wait took longer than the job's one timeout."""


class ProtocolError(Error):
    """Shared memory holds what no worker of ours can have written; the job cannot go on."""


def raise_for_outcome(outcome: int, bad_lane: int, buffers: int) -> None:
    """Raise what a negative or lost outcome of a turn means; return for the others."""
    from fastps.kernels.protocol import lane as turn  # not above: it needs numpy, and `import fastps` does not

    if outcome in (turn.DONE, turn.BUSY):
        return
    if outcome == turn.FENCED:
        raise UsageError(
            "this worker was taken for dead and its turn was broken: expected it to keep running, found that it was stopped"
            " for too long; restart it"
        )
    if outcome == turn.BAD_DESCRIPTOR:
        raise ProtocolError(
            f"worker {bad_lane} posted a push that it had no right to post: its memory is damaged or it does not follow the"
            " protocol; restart the job"
        )
    if outcome == turn.NO_BUFFER:
        raise ProtocolError(f"all {buffers} weights buffers are in use: more readers than workers hold pins; restart the job")
    if outcome == turn.BAD_STATE:
        raise damaged("the committed state of a shard")
    raise ProtocolError(f"the fold refused its job (outcome {outcome}); this is an error of fastps, please report it")


def damaged(what: str) -> ProtocolError:
    """The error for shared memory that something has written over."""
    return ProtocolError(
        f"{what}: expected what fastps writes, found that something else wrote over it: a process of the job stores where it"
        " must not; restart the job"
    )
