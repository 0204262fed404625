"""Discovery of this user's jobs on this machine, from the kernel's list of listening sockets.

fastps keeps no list and no file of jobs: a job runs exactly as long as a process listens at one of its names. Any user may take
such a name, and put any bytes into it. A name that is no place of a job is skipped, and so is a stranger's where the kernel
tells users.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from fastps.errors import ArenaError, AttachError, LayoutError
from fastps.job.layout import Layout, first_difference
from fastps.kernels.shm.arena import Arena
from fastps.kernels.shm.counts import MAX_LANES
from fastps.membership import rendezvous
from fastps.system import shared_memory, unix_sockets
from fastps.system.clock import SYSTEM_CLOCK, Clock

_NAME = re.compile(rb"fastps/(.+)/(host|[0-9]{1,9})")
_ASK_TIMEOUT_S = 0.2
_ANSWER_TIMEOUT_S = 1.0
Found = TypeVar("Found")


def listening() -> dict[str, set[rendezvous.Place]]:
    """The running jobs and their listening places, also strangers' where the kernel shows no users. Raises AttachError."""
    try:
        sockets = unix_sockets.named(b"fastps/")
    except OSError as error:
        raise AttachError(f"expected to read which jobs run from the kernel's list of sockets, found: {error}") from error
    return places_in(each.name for each in sockets if each.listens)


def arenas_of(job: str) -> list[str]:
    """The names of a launched job's arenas that exist: JOB for the script's first optimizer, JOB.1 for the next."""
    return [job if instance == 0 else f"{job}.{instance}" for instance in instances_of(job)]


def instances_of(job: str) -> list[int]:
    """The numbers of a launched job's arenas that exist: 0 for JOB, 1 for JOB.1."""
    found = []
    for name in listening():
        first, _, number = name.rpartition(".")
        if name == job:
            found.append(0)
        elif first == job and number.isdecimal():
            found.append(int(number))
    return found


def places_in(names: Iterable[bytes]) -> dict[str, set[rendezvous.Place]]:
    """The jobs and places among socket names. Names that fastps does not give are skipped.

    >>> sorted(places_in([b"fastps/mnist/host", b"fastps/mnist/0", b"fastps/mnist/1~0a1b2c3d"])["mnist"], key=str)
    [0, 1, 'host']
    """
    found: dict[str, set[rendezvous.Place]] = {}
    for name in names:
        if match := _NAME.fullmatch(unix_sockets.plain(name)):
            job, place = os.fsdecode(match[1]), match[2]
            if job.isprintable():
                found.setdefault(job, set()).add("host" if place == b"host" else int(place))
    return found


def running_jobs(clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """The names of this user's running jobs, in order. Raises AttachError if the kernel's list cannot be read."""
    return sorted(job for job, places in listening().items() if _is_ours(job, places, clock))


def process_of(job: str) -> int | None:
    """The process id of a process of this user that answers for a job; None if none does in time."""
    for place in sorted(listening().get(job, set()), key=str):
        with contextlib.suppress(rendezvous.Absent, rendezvous.Silent, rendezvous.AbiDiffers):
            with rendezvous.connect(job, place, _ASK_TIMEOUT_S, observer=True) as offer:
                return offer.process_id
    return None


def _is_ours(job: str, places: set[rendezvous.Place], clock: Clock) -> bool:
    """Whether a process of this user answers for the job. A process that listens but does not answer, as if stopped, counts."""
    silent = False
    for place in sorted(places, key=str):
        try:
            rendezvous.connect(job, place, _ASK_TIMEOUT_S, observer=True, clock=clock).close()
            return True
        except rendezvous.AbiDiffers:
            return True  # this user's, from another version of fastps; attaching reports that
        except rendezvous.Silent:
            silent = True
        except rendezvous.Absent:
            continue
    return silent


def find(job: str, layout: Layout | None, timeout_s: float, clock: Clock) -> rendezvous.Offer:
    """Connect to each place of `job` until one answers; without a layout, as an observer.

    Raises LayoutError if the layouts differ, and AttachError if no place answers within the timeout, or if the listener belongs
    to another version of fastps.
    """
    text = layout.text() if layout else ""

    def ask(place: rendezvous.Place) -> rendezvous.Offer:
        try:
            return rendezvous.connect(job, place, _ANSWER_TIMEOUT_S, text.encode(), observer=layout is None)
        except rendezvous.LayoutDiffers as difference:
            raise LayoutError(
                f"this worker's model differs from the job's: {first_difference(text, difference.theirs)}; all workers"
                " must build the same model, optimizer and discipline"
            ) from None

    return _first(job, layout.lanes if layout else MAX_LANES, ask, timeout_s, clock)


def find_described(job: str, timeout_s: float, clock: Clock) -> tuple[rendezvous.Offer, str]:
    """Connect to each place of `job` until one answers, and ask for the job's layout: the offer, and the layout's text.

    Raises AttachError, as `find` does.
    """

    def ask(place: rendezvous.Place) -> tuple[rendezvous.Offer, str]:
        try:
            rendezvous.connect(job, place, _ANSWER_TIMEOUT_S).close()  # without a layout: the listener answers with its own
            raise rendezvous.Silent("expected the job's layout, found none")
        except rendezvous.LayoutDiffers as difference:
            text = difference.theirs
        try:
            return rendezvous.connect(job, place, _ANSWER_TIMEOUT_S, text.encode()), text
        except rendezvous.LayoutDiffers:
            raise rendezvous.Absent("another job has taken the name") from None

    return _first(job, MAX_LANES, ask, timeout_s, clock)


def arena_of(job: str, timeout_s: float, clock: Clock, *, writable: bool = False) -> Arena:
    """Map the arena of a job without joining it. Raises AttachError, and ArenaError for one that this fastps cannot read."""
    with find(job, None, timeout_s, clock) as offer:
        return mapped(job, offer, writable=writable)


def mapped(job: str, offer: rendezvous.Offer, *, writable: bool = False) -> Arena:
    """Map the arena of an offer. Raises ArenaError for one that this fastps cannot read."""
    try:
        return Arena(shared_memory.map_shared(offer.memfd, writable=writable))
    except ValueError as error:
        raise ArenaError(f"job {job}: {error}") from error


def places_with(job: str, memory: os.stat_result) -> set[rendezvous.Place]:
    """The listening places of a job that has this memory; none once another one has its name: it was killed, and begun anew."""
    places = listening().get(job, set())
    return places if any(_offers(job, place, memory) for place in sorted(places, key=str)) else set()


def _offers(job: str, place: rendezvous.Place, memory: os.stat_result) -> bool:
    """Whether the process at a place offers this memory, or does not say."""
    try:
        with rendezvous.connect(job, place, _ASK_TIMEOUT_S, observer=True) as offer:
            return os.path.samestat(os.fstat(offer.memfd), memory)
    except (rendezvous.Absent, rendezvous.AbiDiffers):
        return False
    except (rendezvous.Silent, OSError):
        return True


def _first(job: str, lanes: int, ask: Callable[[rendezvous.Place], Found], timeout_s: float, clock: Clock) -> Found:
    """What `ask` gets of the first place that answers. Raises AttachError."""
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    everywhere: list[rendezvous.Place] = ["host", *range(lanes)]
    stranger = ""
    while True:
        is_over = clock.now_ns() >= deadline_ns
        places = listening().get(job, set()) | ({"host"} if is_over else set())  # at last, a stranger's answer is named, too
        for place_of in everywhere:
            try:
                if place_of in places:
                    return ask(place_of)
            except rendezvous.OtherUser as error:
                stranger = f"; {error}"
            except (rendezvous.Absent, rendezvous.Silent):
                continue
            except rendezvous.AbiDiffers as error:
                raise AttachError(f"job {job}: {error}") from error
        if is_over:
            others = ", ".join(sorted(listening())) or "none"
            raise AttachError(
                f"job {job}: expected an answer from its creator or a worker within {timeout_s:g} s, found nobody"
                f"{stranger}. Worker 0 makes the job when it wraps its optimizer: it may still prepare (raise FASTPS_TIMEOUT),"
                " or was not started, gives another job= or FASTPS_JOB, or is in another network namespace (another container);"
                f" jobs of other names that run here: {others}"
            )
        clock.sleep_ns(10_000_000)
