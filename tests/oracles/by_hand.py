"""Sequences of a few events with the answers that the papers ask for, worked out by hand.

The oracles answer them in tests/oracles/test_by_hand.py, the compiled scheduler in tests/kernels/test_scheduler_timed.py.
Nothing here is computed: these are the answers that both were written towards.
"""

from dataclasses import dataclass, field
from typing import Any

from tests.oracles.backup import Backup
from tests.oracles.hardsync import HardSync
from tests.oracles.psp import PspServer
from tests.oracles.r2sp import R2sp
from tests.oracles.softsync import SoftSync
from tests.oracles.staggered import StaggeredSoftSync


@dataclass(frozen=True)
class Event:
    """One call with its arguments, what it answers (folded, granted), and the next timer's deadline after it."""

    kind: str
    arguments: tuple[int, ...]
    folded: list[int]
    granted: list[int]
    due_ns: int | None


def push(
    worker: int,
    now_ns: int,
    timestamp: int,
    folded: list[int],
    granted: list[int],
    due: int | None = None,
    batch: int = 8,
) -> Event:
    return Event("push", (worker, now_ns, timestamp, batch), folded, granted, due)


def leave(worker: int, now_ns: int, folded: list[int], granted: list[int], due: int | None = None) -> Event:
    return Event("leave", (worker, now_ns), folded, granted, due)


def fire(folded: list[int], granted: list[int], due: int | None = None) -> Event:
    return Event("fire", (), folded, granted, due)


@dataclass(frozen=True)
class Sequence:
    """Events of one server, and what it keeps at their end."""

    name: str
    discipline: str
    workers: int
    settings: dict[str, Any]
    events: list[Event]
    version: int
    dropped: dict[int, int] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)

    def oracle(self) -> Any:
        of = {
            "backup": Backup,
            "psp": PspServer,
            "softsync": SoftSync,
            "hardsync": HardSync,
            "r2sp": R2sp,
            "staggered": StaggeredSoftSync,
        }
        return of[self.discipline](self.workers, **self.settings)


BACKUP = [
    Sequence(
        "the slowest is dropped and reads the theta of now",
        "backup",
        3,
        {"b": 1},
        [
            push(2, 10, 0, [], []),
            push(0, 20, 0, [0, 2], [0, 2]),
            push(0, 30, 1, [], []),
            push(1, 40, 0, [], [1]),  # late: version 0 is over; its next is of version 1 and still in time
            push(1, 50, 1, [0, 1], [0, 1]),
            push(2, 60, 1, [], [2]),
        ],
        version=2,
        dropped={0: 0, 1: 1, 2: 1},
    ),
    Sequence(
        "at one time the order of arrival decides",
        "backup",
        3,
        {"b": 1},
        [push(1, 10, 0, [], []), push(2, 10, 0, [1, 2], [1, 2]), push(0, 10, 0, [], [0])],
        version=1,
        dropped={0: 1, 1: 0, 2: 0},
    ),
    Sequence(
        "without backups it is bsp",
        "backup",
        2,
        {"b": 0},
        [push(1, 5, 0, [], []), push(0, 9, 0, [0, 1], [0, 1]), push(0, 9, 1, [], []), push(1, 9, 1, [0, 1], [0, 1])],
        version=2,
    ),
    Sequence(
        "a leaver's gradient stays and counts",
        "backup",
        4,
        {"b": 1},
        [
            push(0, 1, 0, [], []),
            leave(0, 2, [], []),
            push(1, 3, 0, [], []),
            push(3, 4, 0, [0, 1, 3], [1, 3]),
            push(2, 5, 0, [], [2]),
        ],
        version=1,
        dropped={1: 0, 2: 1, 3: 0},
    ),
    Sequence(
        "with fewer live than N all of them are enough",
        "backup",
        4,
        {"b": 1},
        [
            push(1, 1, 0, [], []),
            leave(0, 2, [], []),
            push(2, 3, 0, [], []),
            leave(3, 4, [1, 2], [1, 2]),  # two live, both in the set
            push(2, 5, 1, [], []),
            push(1, 6, 1, [1, 2], [1, 2]),
            push(1, 7, 2, [], []),
            leave(2, 8, [1], [1]),
            push(1, 9, 3, [1], [1]),
        ],
        version=4,
    ),
    Sequence(
        "the last to leave takes nothing along",
        "backup",
        3,
        {"b": 0},
        [
            push(0, 1, 0, [], []),
            leave(0, 1, [], []),
            leave(1, 2, [], []),
            leave(2, 3, [0], []),
        ],
        version=1,
    ),
]

PSP = [
    Sequence(
        "without a timeout the c-th gradient ends the version",
        "psp",
        3,
        {"c": 2, "tau1_ns": 0},
        [
            push(1, 10, 0, [], []),
            push(0, 10, 0, [0, 1], [0, 1]),
            push(2, 10, 0, [], [2]),
            push(2, 20, 1, [], []),
            push(1, 20, 1, [1, 2], [1, 2]),
        ],
        version=2,
        dropped={0: 0, 1: 0, 2: 1},
    ),
    Sequence(
        "the timeout runs from the c-th gradient; what arrives at the deadline is late",
        "psp",
        4,
        {"c": 2, "tau1_ns": 100},
        [
            push(0, 10, 0, [], []),
            push(3, 30, 0, [], [], due=130),
            push(1, 129, 0, [], [], due=130),
            fire([0, 1, 3], [0, 1, 3]),
            push(2, 130, 0, [], [2]),
        ],
        version=1,
        dropped={0: 0, 1: 0, 2: 1, 3: 0},
    ),
    Sequence(
        "all workers have responded before the timeout",
        "psp",
        3,
        {"c": 2, "tau1_ns": 100},
        [
            push(0, 10, 0, [], []),
            push(1, 20, 0, [], [], due=120),
            push(2, 119, 0, [0, 1, 2], [0, 1, 2]),
            push(0, 121, 1, [], []),  # the first version's timer is gone
            push(1, 121, 1, [], [], due=221),
        ],
        version=1,
    ),
    Sequence(
        "a worker that went on without this server is in one sum twice and makes the c-th gradient",
        "psp",
        3,
        {"c": 3, "tau1_ns": 50},
        [
            push(0, 10, 0, [], []),
            push(0, 20, 1, [], []),
            push(1, 30, 0, [], [], due=80),
            fire([0, 0, 1], [0, 1]),
            push(2, 80, 0, [], [2]),
            push(0, 90, 1, [], []),
        ],
        version=1,
        dropped={0: 0, 1: 0, 2: 1},
    ),
    Sequence(
        "a dropped gradient is no response, and an event out of time counts at the latest time",
        "psp",
        2,
        {"c": 1, "tau1_ns": 40},
        [
            push(0, 100, 0, [], [], due=140),
            fire([0], [0]),
            push(1, 120, 0, [], [1]),  # late in both senses: it counts at 140
            push(0, 130, 1, [], [], due=180),
            push(1, 150, 0, [], [1], due=180),
            push(1, 179, 1, [0, 1], [0, 1]),
        ],
        version=2,
        dropped={0: 0, 1: 2},
    ),
    Sequence(
        "a leave completes the sum; a leaver's gradient stays in it",
        "psp",
        4,
        {"c": 4, "tau1_ns": 10},
        [
            push(0, 1, 0, [], []),
            push(1, 2, 0, [], []),
            leave(1, 3, [], []),
            leave(2, 4, [], []),
            push(0, 5, 1, [], []),  # two live, of whom only 0 has responded
            leave(3, 6, [0, 0, 1], [0]),
            push(0, 7, 1, [0], [0]),
            leave(0, 8, [], []),
        ],
        version=2,
    ),
    Sequence(
        "a leaver's gradient keeps the timer running",
        "psp",
        2,
        {"c": 1, "tau1_ns": 10},
        [
            push(0, 1, 0, [], [], due=11),
            leave(0, 2, [], [], due=11),
            fire([0], []),
            push(1, 11, 0, [], [1]),
            push(1, 12, 1, [1], [1]),
        ],
        version=2,
        dropped={1: 1},
    ),
]

SOFTSYNC = [
    Sequence(
        "the first c gradients of whoever sends them",
        "softsync",
        4,
        {"n": 2},
        [
            push(3, 1, 0, [], [3]),
            push(3, 2, 0, [3, 3], [3]),
            push(0, 2, 0, [], [0]),
            push(3, 2, 1, [0, 3], [3]),
            push(1, 3, 0, [], [1]),
            push(2, 4, 0, [1, 2], [2]),  # two versions late, and not dropped
        ],
        version=3,
        dropped={0: 0, 1: 0, 2: 0, 3: 0},
    ),
    Sequence(
        "n = lambda is Async",
        "softsync",
        2,
        {"n": 2},
        [push(1, 1, 0, [1], [1]), push(1, 1, 1, [1], [1]), push(0, 1, 0, [0], [0])],
        version=3,
    ),
    Sequence(
        "c = floor(5 / 2) = 2, and at least 1",
        "softsync",
        5,
        {"n": 2},
        [
            push(4, 1, 0, [], [4]),
            push(2, 2, 0, [2, 4], [2]),
            leave(0, 3, [], []),
            leave(1, 3, [], []),  # floor(3 / 2) = 1
            push(4, 4, 1, [4], [4]),
            leave(2, 5, [], []),
            leave(3, 5, [], []),  # floor(1 / 2) = 0, so 1
            push(4, 6, 2, [4], [4]),
        ],
        version=3,
    ),
    Sequence(
        "a leave makes c small enough for what is there",
        "softsync",
        3,
        {"n": 1},
        [
            push(0, 1, 0, [], [0]),
            push(0, 2, 0, [], [0]),
            leave(0, 3, [0, 0], []),
            push(2, 4, 1, [], [2]),
            leave(1, 5, [2], []),
            leave(2, 6, [], []),
        ],
        version=2,
    ),
    Sequence(
        "alone, every gradient is a fold",
        "softsync",
        2,
        {"n": 1},
        [leave(1, 1, [], []), push(0, 2, 0, [0], [0]), leave(0, 2, [], [])],
        version=1,
    ),
]

HARDSYNC = [
    Sequence(
        "one gradient of each",
        "hardsync",
        3,
        {},
        [push(2, 1, 0, [], []), push(0, 2, 0, [], []), push(1, 3, 0, [0, 1, 2], [0, 1, 2]), push(1, 3, 1, [], [])],
        version=1,
    ),
    Sequence("one learner", "hardsync", 1, {}, [push(0, 1, 0, [0], [0]), push(0, 1, 1, [0], [0])], version=2),
    Sequence(
        "a leave completes the version",
        "hardsync",
        3,
        {},
        [push(0, 1, 0, [], []), push(1, 1, 0, [], []), leave(2, 1, [0, 1], [0, 1]), push(0, 2, 1, [], [])],
        version=1,
    ),
    Sequence(
        "a leaver's gradient stays",
        "hardsync",
        2,
        {},
        [push(0, 1, 0, [], []), leave(0, 2, [], []), push(1, 3, 0, [0, 1], [1]), leave(1, 4, [], [])],
        version=1,
    ),
]

# Every worker's first iteration is no sample, so T is known from the first of the second pushes on. Timestamps decide
# nothing here and are left 0.
R2SP = [
    Sequence(
        "updates wait for their turn and follow at once",
        "r2sp",
        3,
        {"relax": 1.0},
        [
            push(2, 5, 0, [], []),
            push(1, 6, 0, [], []),
            push(0, 7, 0, [0, 1, 2], [0, 1, 2]),  # nothing is known of T: no gap
        ],
        version=3,
    ),
    Sequence(
        "permissions a gap of T / N apart",
        "r2sp",
        3,
        {"relax": 1.0},
        [
            push(0, 10, 0, [0], [0]),
            push(1, 10, 0, [1], [1]),
            push(2, 10, 0, [2], [2]),
            push(2, 310, 0, [], []),  # T = 300
            push(0, 310, 0, [0], [0]),  # the permission before was at 10
            push(1, 310, 0, [1, 2], [], due=410),
            fire([], [1], due=510),
            fire([], [2]),
            push(0, 610, 0, [0], [0]),  # at 510 + 100 exactly
        ],
        version=7,
    ),
    Sequence(
        "relaxed to r T / N, in whole ns",
        "r2sp",
        2,
        {"relax": 0.8},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(0, 100, 0, [0], [0]),
            push(1, 139, 0, [1], [], due=155),  # T = 139: 0.8 * 139 / 2 = 55.6
            fire([], [1]),
            push(0, 210, 0, [0], [0]),  # 155 + 55
        ],
        version=5,
    ),
    Sequence(
        "the average moves by an eighth, in whole ns, towards the old value",
        "r2sp",
        1,
        {"relax": 1.0},
        [
            push(0, 0, 0, [0], [0]),
            push(0, 100, 0, [0], [0]),  # T = 100
            push(0, 131, 0, [0], [], due=192),  # 31 after 100: -69 / 8 is -8, T = 92
            fire([], [0]),
            push(0, 307, 0, [0], [0]),  # 115 after 92: 23 / 8 is 2, T = 94; 192 + 94 is past
            push(0, 309, 0, [0], [], due=390),  # 2 after 94: -92 / 8 is -11, T = 83
        ],
        version=5,
    ),
    Sequence(
        "an event out of time counts at the latest time",
        "r2sp",
        2,
        {"relax": 1.0},
        [
            push(0, 100, 0, [0], [0]),
            push(1, 50, 0, [1], [1]),  # at 100
            push(0, 200, 0, [0], [0]),
            push(1, 150, 0, [1], [], due=250),  # at 200: T = 100, the permission before was at 200
            fire([], [1]),
        ],
        version=4,
    ),
    Sequence(
        "a leaver's push is folded first, and its turns are skipped",
        "r2sp",
        3,
        {"relax": 0.0},
        [
            push(2, 1, 0, [], []),
            push(1, 2, 0, [], []),
            leave(2, 3, [2], []),
            push(0, 4, 0, [0, 1], [0, 1]),
            push(0, 5, 0, [0], [0]),
        ],
        version=4,
    ),
    Sequence(
        "who held both turns leaves",
        "r2sp",
        3,
        {"relax": 0.0},
        [
            push(2, 1, 0, [], []),
            push(1, 1, 0, [], []),
            leave(0, 2, [1, 2], [1, 2]),
            push(2, 3, 0, [], []),
            push(1, 4, 0, [1, 2], [1, 2]),
            leave(1, 5, [], []),
            push(2, 6, 0, [2], [2]),
            leave(2, 7, [], []),
        ],
        version=5,
    ),
    Sequence(
        "a leave folds the leaver's push and then what waited behind it",
        "r2sp",
        3,
        {"relax": 0.0},
        [
            push(0, 1, 0, [0], [0]),
            push(0, 2, 0, [], []),
            push(2, 3, 0, [], []),
            leave(1, 4, [2, 0], [0, 2]),
            push(0, 5, 0, [], []),
            leave(0, 6, [0], []),
            push(2, 7, 0, [2], [2]),
        ],
        version=5,
    ),
    Sequence(
        "the slowest leaves, so T and N are smaller",
        "r2sp",
        3,
        {"relax": 1.0},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(2, 0, 0, [2], [2]),
            push(0, 90, 0, [0], [0]),  # T = 90
            push(1, 150, 0, [1], [1]),  # T = 150: 90 + 50 is past
            push(2, 600, 0, [2], [2]),  # T = 600
            push(0, 620, 0, [0], [], due=800),  # 530 after 90: 145
            leave(2, 630, [], [], due=675),  # T = 150, N = 2
            push(1, 640, 0, [1], [], due=696),  # 490 after 150: 340 / 8 is 42, T = 192
            fire([], [0], due=792),
            fire([], [1]),
        ],
        version=8,
    ),
    Sequence(
        "the slowest leaves, and the smaller gap has passed",
        "r2sp",
        3,
        {"relax": 1.0},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(2, 0, 0, [2], [2]),
            push(0, 90, 0, [0], [0]),
            push(1, 150, 0, [1], [1]),
            push(2, 600, 0, [2], [2]),
            push(0, 620, 0, [0], [], due=800),
            leave(2, 700, [], [0]),
        ],
        version=7,
    ),
    Sequence(
        "the batch that makes the iterations equal",
        "r2sp",
        2,
        {"relax": 0.0, "tune": True},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(0, 100, 0, [0], [0]),
            push(0, 200, 0, [], []),  # twice 8 in 100: k = 12.5
            push(1, 400, 0, [1, 0], [0, 1]),  # 8 in 400
        ],
        version=5,
        batch={0: 32, 1: 8},
    ),
    Sequence(
        "a line with a constant",
        "r2sp",
        2,
        {"relax": 0.0, "tune": True},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(0, 100, 0, [0], [0]),
            push(0, 320, 0, [], [], batch=32),  # 8 in 100 and 32 in 220: 60 + 5 b
            push(1, 400, 0, [1, 0], [0, 1]),  # 60 + 5 * 68 = 400
        ],
        version=5,
        batch={0: 68, 1: 8},
    ),
    Sequence(
        "larger batches in less time are no line",
        "r2sp",
        2,
        {"relax": 0.0, "tune": True},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(0, 200, 0, [0], [0]),
            push(0, 300, 0, [], [], batch=16),  # 24 in 300: k = 12.5
            push(1, 400, 0, [1, 0], [0, 1]),
        ],
        version=5,
        batch={0: 32, 1: 8},
    ),
    Sequence(
        "a line below nothing at batch 0 is none",
        "r2sp",
        2,
        {"relax": 0.0, "tune": True},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(0, 100, 0, [0], [0]),
            push(0, 500, 0, [], [], batch=16),  # k would be 37.5 and a -200; so 24 in 500
            push(1, 1010, 0, [1, 0], [0, 1]),  # 48.48
        ],
        version=5,
        batch={0: 48, 1: 8},
    ),
    Sequence(
        "sixteen times the base batch at most",
        "r2sp",
        2,
        {"relax": 0.0, "tune": True},
        [
            push(0, 0, 0, [0], [0]),
            push(1, 0, 0, [1], [1]),
            push(0, 8, 0, [0], [0]),
            push(0, 16, 0, [], []),
            push(1, 4000, 0, [1, 0], [0, 1]),
        ],
        version=5,
        batch={0: 128, 1: 8},
    ),
    Sequence(
        "without a sample, or a time in it, the base batch",
        "r2sp",
        2,
        {"relax": 0.0, "tune": True},
        [
            push(0, 5, 0, [0], [0], batch=3),
            push(1, 5, 0, [1], [1], batch=7),
            push(0, 5, 0, [0], [0], batch=3),
        ],
        version=3,
        batch={0: 3, 1: 7},
    ),
]

STAGGERED = [
    Sequence(
        "folded together, granted apart",
        "staggered",
        2,
        {"n": 1, "relax": 1.0},
        [
            push(0, 0, 0, [], [0]),  # its gradient is in no fold yet
            push(1, 0, 0, [0, 1], [1]),
            push(1, 100, 1, [], []),
            push(0, 100, 0, [0, 1], [0], due=150),
            fire([], [1]),
        ],
        version=2,
    ),
    Sequence(
        "two gradients of one learner in a sum; a leave passes the turn on",
        "staggered",
        3,
        {"n": 1, "relax": 1.0},
        [
            push(0, 1, 0, [], [0]),
            push(0, 2, 0, [], []),
            push(1, 3, 0, [0, 0, 1], [1]),  # T = 1, a gap of 0
            leave(2, 4, [], [0]),
        ],
        version=1,
    ),
    Sequence(
        "a leave completes the sum",
        "staggered",
        2,
        {"n": 1, "relax": 1.0},
        [push(0, 1, 0, [], [0]), leave(1, 2, [0], []), push(0, 3, 1, [0], [0]), push(0, 4, 2, [0], [], due=5)],
        version=3,
    ),
    Sequence(
        "folds keep no order",
        "staggered",
        2,
        {"n": 2, "relax": 1.0},
        [push(1, 1, 0, [1], []), push(0, 2, 0, [0], [0, 1]), push(1, 2, 2, [1], []), push(0, 2, 2, [0], [0, 1])],
        version=4,
    ),
]

SEQUENCES = [*BACKUP, *PSP, *SOFTSYNC, *HARDSYNC, *R2SP, *STAGGERED]
