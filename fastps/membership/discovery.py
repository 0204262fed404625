"""Discovery of the jobs that run on this machine, from the kernel's list of listening sockets.

fastps keeps no list and no file of jobs: a job runs exactly as long as a process listens at one of its names.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fastps.errors import AttachError, LayoutError
from fastps.job.layout import Layout, first_difference
from fastps.kernels.shm.arena import ABI, MAX_LANES
from fastps.membership import rendezvous
from fastps.system.clock import SYSTEM_CLOCK, Clock

_TABLE = Path("/proc/net/unix")
_LISTENS = 0x10000  # __SO_ACCEPTCON, in the column of flags
_PREFIX = b"@fastps/"  # the table shows the zero byte of an abstract name as @
_ASK_TIMEOUT_S = 0.2
_ANSWER_TIMEOUT_S = 1.0
Found = TypeVar("Found")


def listening() -> dict[str, set[rendezvous.Place]]:
    """The running jobs of all users, each with the places at which a process listens. Raises AttachError."""
    try:
        table = _TABLE.read_bytes()
    except OSError as error:
        raise AttachError(f"expected to read which jobs run from {_TABLE}, found: {error}") from error
    return places_in(table)


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


def places_in(table: bytes) -> dict[str, set[rendezvous.Place]]:
    """The jobs and places in a table in the format of /proc/net/unix. Sockets that are not from fastps are skipped.

    >>> lines = b"0: 2 0 00010000 0001 01 7 @fastps/mnist/host\\n0: 2 0 00010000 0001 01 8 @fastps/mnist/0\\n"
    >>> sorted(places_in(lines)["mnist"], key=str)
    [0, 'host']
    """
    found: dict[str, set[rendezvous.Place]] = {}
    for line in table.split(b"\n"):
        columns = line.split(None, 7)
        if len(columns) != 8 or not columns[7].startswith(_PREFIX) or not int(columns[3], 16) & _LISTENS:
            continue
        job, slash, place = columns[7].removeprefix(_PREFIX).rpartition(b"/")
        if not slash or not (place == b"host" or place.isdigit()):
            continue
        found.setdefault(os.fsdecode(job), set()).add("host" if place == b"host" else int(place))
    return found


def running_jobs(clock: Clock = SYSTEM_CLOCK) -> list[str]:
    """The names of this user's running jobs, in order. Raises AttachError if the kernel's list cannot be read."""
    return sorted(job for job, places in listening().items() if _is_ours(job, places, clock))


def _is_ours(job: str, places: set[rendezvous.Place], clock: Clock) -> bool:
    """Whether a process of this user answers for the job. A process that listens but does not answer, as if stopped, counts."""
    silent = False
    for place in sorted(places, key=str):
        try:
            answer = rendezvous.connect(
                job, place, abi=ABI, layout_hash=bytes(32), layout=b"", observer=True, timeout_s=_ASK_TIMEOUT_S, clock=clock
            )
        except rendezvous.Absent:
            continue
        except rendezvous.Silent:
            silent = True
            continue
        except rendezvous.OtherUser:
            return False
        except rendezvous.AbiDiffers:
            return True  # this user's, from another version of fastps; attaching reports that
        os.close(answer.memfd)
        os.close(answer.pidfd)
        return True
    return silent


def find(job: str, layout: Layout | None, timeout_s: float, clock: Clock) -> rendezvous.Offer:
    """Connect to each place of `job` until one answers; without a layout, as an observer.

    Raises LayoutError if the layouts differ, and AttachError if no place answers within the timeout, or if the listener belongs
    to another user or another version of fastps.
    """
    text = layout.text() if layout else ""
    digest = layout.digest() if layout else bytes(32)

    def ask(place: rendezvous.Place) -> rendezvous.Offer:
        try:
            return _connect(job, place, digest, text, observer=layout is None)
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
            offer = _connect(job, place, bytes(32), "")  # the hash of no layout: the listener answers with its own
        except rendezvous.LayoutDiffers as difference:
            text = difference.theirs
        else:
            os.close(offer.memfd)
            os.close(offer.pidfd)
            raise rendezvous.Silent("expected the job's layout, found none")
        try:
            return _connect(job, place, hashlib.sha256(text.encode()).digest(), text), text
        except rendezvous.LayoutDiffers:
            raise rendezvous.Absent("another job has taken the name") from None

    return _first(job, MAX_LANES, ask, timeout_s, clock)


def _connect(job: str, place: rendezvous.Place, digest: bytes, text: str, *, observer: bool = False) -> rendezvous.Offer:
    return rendezvous.connect(
        job, place, abi=ABI, layout_hash=digest, layout=text.encode(), observer=observer, timeout_s=_ANSWER_TIMEOUT_S
    )


def _first(job: str, lanes: int, ask: Callable[[rendezvous.Place], Found], timeout_s: float, clock: Clock) -> Found:
    """What `ask` gets of the first place that answers. Raises AttachError."""
    deadline_ns = clock.now_ns() + int(timeout_s * 1e9)
    places: list[rendezvous.Place] = ["host", *range(lanes)]
    while True:
        for place_of in places:
            try:
                return ask(place_of)
            except (rendezvous.Absent, rendezvous.Silent):
                continue
            except (rendezvous.AbiDiffers, rendezvous.OtherUser) as error:
                raise AttachError(f"job {job}: {error}") from error
        if clock.now_ns() >= deadline_ns:
            others = ", ".join(sorted(listening())) or "none"
            raise AttachError(
                f"job {job}: expected an answer from its creator or a worker within {timeout_s:g} s, found nobody (jobs that"
                f" run here: {others}); was worker 0 started, and do all workers give the same job= or FASTPS_JOB?"
            )
        clock.sleep_ns(10_000_000)
