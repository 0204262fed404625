"""The errors of fastps, and the translation of the compiled core's outcomes into exceptions.

Each message is one sentence: what was expected, what was found, what to do.
"""

import contextlib
import copyreg
from collections.abc import Iterator
from typing import Any

TRY_AGAIN = 75
"""The exit code of a job that ended because a node was lost: to start all nodes again heals that. EX_TEMPFAIL of sysexits.h."""


class Error(Exception):
    """Base of all named errors of fastps. The text is meant for people. Pickle and copy keep the attributes.

    >>> import copy, pickle
    >>> pickle.loads(pickle.dumps(WorkerDiedError("worker 3 died", 3))).worker
    3
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Restore it without calling its constructor, which may take other parameters than `args`.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]  # typeshed lacks it


class PolicyError(Error, ValueError):
    """A synchronization spec that no discipline accepts."""


class LayoutError(Error, ValueError):
    """Workers of one job describe different models, rules or disciplines."""


class UnsupportedError(Error, TypeError):
    """A tensor, optimizer or option that fastps does not handle."""


class ArenaError(Error):
    """The arena cannot be created or mapped: too little memory, or memory that is not from fastps."""


class AttachError(Error):
    """A worker cannot join the job."""


class UsageError(Error, RuntimeError):
    """A call at the wrong moment, or in the wrong process."""


class ParameterChangedError(Error, RuntimeError):
    """The script wrote to a parameter outside of step()."""


class _OfWorkerError(Exception):
    def __init__(self, message: str, worker: int) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerDiedError(_OfWorkerError, Error):
    """Another worker of the job failed, or died without leaving. The attribute `worker` is its lane."""


class ExpelledError(_OfWorkerError, Error):
    """A worker's words in shared memory are damaged, and the others go on without it. The attribute `worker` is its lane."""


class NodeLostError(Error):
    """A node of the job was lost, failed, or did not come. The attribute `node` is its number; -1 if this node cannot tell."""

    exit_code = TRY_AGAIN  # of a command that it ends

    def __init__(self, message: str, node: int = -1) -> None:
        super().__init__(message)
        self.node = node


class NonFiniteGradientError(_OfWorkerError, Error, ArithmeticError):
    """A push had a non-finite gradient, or would have made the weights non-finite; it was not folded.

    The attribute `worker` is the rank of the worker that pushed.
    """


class NonFiniteWeightsError(Error, ArithmeticError):
    """Finite gradients made weights on a device non-finite, and other workers may have read them."""


class CheckpointError(Error, ValueError):
    """A checkpoint cannot be read or written, is damaged, or belongs to another model or rule."""


class TimeoutExceededError(Error, TimeoutError):
    """A wait took longer than the job's timeout."""


class ProtocolError(Error):
    """Shared memory holds a value that no worker can have written. The job cannot go on."""


def raise_for_outcome(outcome: int, bad_lane: int, buffers: int) -> None:
    """Raise the error for an outcome of try_combine that is negative or FENCED. Return for DONE and BUSY."""
    from fastps.kernels.protocol import lane  # here because it imports numpy, which `import fastps` must not need

    if outcome in (lane.DONE, lane.BUSY):
        return
    if outcome == lane.FENCED:
        raise UsageError(
            "this worker was fenced: the others took it for dead; expected it to keep running, found that it was stopped for"
            " too long; restart it"
        )
    if outcome == lane.BAD_DESCRIPTOR:
        raise ProtocolError(
            f"worker {bad_lane} posted a push that it had no right to post: its memory is damaged or it does not follow the"
            " protocol; restart the job"
        )
    if outcome == lane.NO_BUFFER:
        raise ProtocolError(
            f"all {buffers} weights buffers are pinned: expected as many pins as workers and readers, found more: memory"
            " is damaged; restart the job"
        )
    if outcome == lane.BAD_STATE:
        raise damaged("the committed state of a shard")
    raise ProtocolError(f"the fold failed with outcome {outcome}; this is an error of fastps, please report it")


@contextlib.contextmanager
def naming_isa() -> Iterator[None]:
    """Name FASTPS_ISA in the error of an import inside: compiled code refuses its value, and knows no error of fastps."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith("expected an instruction set of this machine"):
            raise
        raise UsageError(f"FASTPS_ISA: {error}") from None


def damaged(what: str) -> ProtocolError:
    """The error for shared memory that was overwritten."""
    return ProtocolError(
        f"{what}: expected what fastps writes, found that a process of the job has overwritten it; restart the job"
    )
