"""The live driver of a lane that waits, and the only loop of fastps that waits for a grant.

`Wait` (kernels/protocol/wait) decides what a lane does next. The driver does it: it rests, checks the peers, and reports.
Between two rests Python runs signal handlers (Ctrl-C), and the peers are checked every 20 ms, so a death is reported within
100 ms and no wait hangs.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

from fastps.errors import TimeoutExceededError, raise_for_outcome
from fastps.kernels.protocol.lane import BAD_DESCRIPTOR, BUSY, DONE
from fastps.kernels.protocol.wait import CHECK_PEERS, EXPEL, EXPELLED, NOTHING, PAUSE, REST, TAKE_OVER, Wait
from fastps.membership.membership import Survivor, expel
from fastps.membership.stalls import Stalls
from fastps.system.deadline import Deadline

_Found = TypeVar("_Found")


class Driven(Survivor, Protocol):
    """The owner of a lane, as its driver needs it: a worker or a server."""

    stalls: Stalls  # passes by a peer that has stopped

    def check_peers(self, now_ns: int) -> None:
        """Handle peers that have died. Raises the error that ends the job."""

    def take_over(self) -> None:
        """Combine from now on, because the server is gone."""

    def tell_expelled(self) -> None:
        """Report workers that were expelled. Raises ExpelledError if this is one."""

    def explain_failure(self) -> bool:
        """Raise the cause of a failed combine, if it is known. True: go on all the same."""


def drive(
    owner: Driven,
    wait: Wait,
    overdue: Callable[[], str] | None,
    reached: Callable[[], _Found | None] = lambda: None,
    beside: Sequence[tuple[Driven, Wait]] = (),
) -> _Found | None:
    """Do what `wait` wants, until it is over or `reached` returns what is true. Returns that.

    `beside`: waits of the process's other jobs, which go on meanwhile.
    Raises TimeoutExceededError with the text `overdue` after each of the store's timeouts, unless it is empty (None: never),
    ProtocolError, ExpelledError, and the errors of `owner`.
    """
    clock, deadline = owner.store.clock, None
    while True:
        now_ns = clock.now_ns()
        for other, its in beside:
            _next(other, its, now_ns)
        want = _next(owner, wait, now_ns)
        if want == NOTHING:
            return None
        if want in (REST, PAUSE) and not wait.held and (found := reached()):
            return found
        deadline = deadline or Deadline(now_ns, int(owner.store.timeout_s * 1e9))
        if overdue is not None and deadline.is_over(now_ns):
            if text := overdue():
                raise TimeoutExceededError(text)
            deadline = None
        if want == REST:
            wait.rest()
        elif want == PAUSE:
            clock.sleep_ns(wait.slice_ns)


def drive_step(owner: Driven, wait: Wait, goal: tuple[int, int, int], overdue: Callable[[], str]) -> int:
    """Wait for a step, most often for one rest. Returns the time at which the wait ended, in ns. Raises as `drive`.

    `goal`: the `granted`, `done` and `shards` of `Wait.begin_step`.
    """
    clock, (granted, done, shards) = owner.store.clock, goal
    began_ns = clock.now_ns()
    if not wait.take_step(granted, done, began_ns, shards):
        drive(owner, wait, overdue)
    ended_ns = clock.now_ns()
    wait.last_wait_ns = ended_ns - began_ns
    return ended_ns


def poll(
    owners: Sequence[Driven],
    reached: Callable[[], _Found | None],
    pause_ns: int,
    overdue: Callable[[], str],
    *,
    combines: bool = False,
) -> _Found:
    """Poll `reached` every `pause_ns` until its result is true, check the owners' peers meanwhile, and return the result.

    The lanes `combine` meanwhile, or are left alone. Raises as `drive`.
    """
    waits = [(owner, Wait(owner.lane)) for owner in owners]
    for owner, wait in waits:
        wait.begin_own(pause_ns, owner.store.clock.now_ns(), combines)
    return cast(_Found, drive(*waits[0], overdue, reached, waits[1:]))


def combine(owner: Driven, overdue: Callable[[], str]) -> None:
    """Combine on every shard whose lock is free. Raises as `drive`."""
    with owner.combine_lock:
        outcome = owner.lane.try_combine(owner.store.clock.now_ns())
        if outcome not in (DONE, BUSY):
            finish_combine(owner, outcome, overdue)


def finish_combine(owner: Driven, outcome: int, overdue: Callable[[], str]) -> None:
    """End a combine that returned `outcome`: finish a fold that waits for its helpers, and raise the error of a failed one.

    A worker whose words are damaged is expelled, if the job goes on without it. Raises as `drive`.
    """
    wait = Wait(owner.lane)
    wait.begin_outcome(outcome, owner.store.clock.now_ns())
    drive(owner, wait, overdue)


def _next(owner: Driven, wait: Wait, now_ns: int) -> int:
    """What `wait` wants next. All but a rest or a pause is done."""
    with owner.combine_lock:
        want: int = wait.want(now_ns)
    if want not in (NOTHING, REST, PAUSE):
        _report(owner, wait, want, now_ns)
    return want


def _report(owner: Driven, wait: Wait, want: int, now_ns: int) -> None:
    if want == CHECK_PEERS:
        owner.check_peers(now_ns)
        with owner.combine_lock:
            owner.stalls.check(now_ns, wait.set_outcome)
    elif want == EXPEL and expel(owner.store, owner.lane.bad_lane, owner.lane.damage):
        owner.tell_expelled()
    elif want == TAKE_OVER:
        owner.take_over()
    elif want == EXPELLED:
        owner.tell_expelled()
    elif not owner.explain_failure():
        outcome = BAD_DESCRIPTOR if want == EXPEL else wait.outcome
        raise_for_outcome(outcome, owner.lane.bad_lane, owner.store.arena.buffers)
