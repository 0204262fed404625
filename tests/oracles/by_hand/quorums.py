"""Worked out by hand: quorums of backup workers and of PSP, whose late pushes are dropped."""

from tests.oracles.by_hand.events import Sequence, fire, join, leave, push

# fmt: off
BACKUP = [
    Sequence("Algorithm 4, line 6: 'else Drop gradient G': the slowest is dropped and reads the theta of now",
        "backup", 3, "backup:1", version=2, dropped={0: 0, 1: 1, 2: 1}, events=[
        push(2, 10, 0, [], []),
        push(0, 20, 0, [0, 2], [0, 2]),
        push(0, 30, 1, [], []),
        push(1, 40, 0, [], [1]),  # late: version 0 is over; its next push is for version 1, and in time
        push(1, 50, 1, [0, 1], [0, 1]),
        push(2, 60, 1, [], [2]),
    ]),
    Sequence("section 3: 'as soon as the parameter servers receive gradients from any N workers': at one time arrival decides",
        "backup", 3, "backup:1", version=1, dropped={0: 1, 1: 0, 2: 0}, events=[
        push(1, 10, 0, [], []), push(2, 10, 0, [1, 2], [1, 2]), push(0, 10, 0, [], [0]),
    ]),
    Sequence("section 3: 'wait for all workers to send their gradients': without backups it is bsp",
        "backup", 2, "backup:0", version=2, events=[
        push(1, 5, 0, [], []), push(0, 9, 0, [0, 1], [0, 1]), push(0, 9, 1, [], []), push(1, 9, 1, [0, 1], [0, 1]),
    ]),
    Sequence("Algorithm 4, line 3: 'while |G| < N': a leaver's gradient stays, and is none of the N of those that live",
        "backup", 4, "backup:1", version=1, dropped={1: 0, 2: 1, 3: 0}, events=[
        push(0, 1, 0, [], []),
        leave(0, 2, [], []),
        push(1, 3, 0, [], []),
        push(3, 4, 0, [0, 1, 3], [1, 3]),
        push(2, 5, 0, [], [2]),
    ]),
    Sequence(
        "Algorithm 4 has N + b workers that stay: where they leave and join, b of them are not waited for (fastps' choice)",
        "backup", 4, "backup:1", version=2, dropped={0: 0, 1: 0, 2: 1, 3: 0}, events=[
        push(1, 1, 0, [], []),
        push(0, 2, 0, [], []),
        leave(3, 3, [0, 1], [0, 1]),  # three live, so two are enough
        push(0, 4, 1, [], []),
        join(3, 5, [3]),  # four live: three are needed
        push(1, 6, 1, [], []),
        push(3, 7, 1, [0, 1, 3], [0, 1, 3]),
        push(2, 8, 0, [], [2]),
    ]),
    Sequence("N is 1 at least", "backup", 3, "backup:2", version=2, dropped={1: 0, 2: 1}, events=[
        leave(0, 1, [], []), push(1, 2, 0, [1], [1]), leave(1, 3, [], []), push(2, 4, 0, [], [2]), push(2, 5, 1, [2], [2]),
    ]),
    Sequence("the last to leave takes nothing along", "backup", 3, "backup:0", version=1, events=[
        push(0, 1, 0, [], []), leave(0, 1, [], []), leave(1, 2, [], []), leave(2, 3, [0], []),
    ]),
]

PSP = [
    Sequence(
        "section 4.2: 'we do not use the timeout mechanism, which means we set tau1 = 0': the c-th gradient ends the version",
        "psp", 3, "psp:2,0.5", version=2, dropped={0: 0, 1: 0, 2: 1}, events=[
        push(1, 10, 0, [], []),
        push(0, 10, 0, [0, 1], [0, 1]),
        push(2, 10, 0, [], [2]),
        push(2, 20, 1, [], []),
        push(1, 20, 1, [1, 2], [1, 2]),
    ]),
    Sequence("line 12: 'Timeout tau1 after c gradients have been received': what arrives at the deadline is late",
        "psp", 4, "psp:2,0.5,push_timeout=100e-9", version=1, dropped={0: 0, 1: 0, 2: 1, 3: 0}, events=[
        push(0, 10, 0, [], []),
        push(3, 30, 0, [], [], due=130),
        push(1, 129, 0, [], [], due=130),
        fire([0, 1, 3], [0, 1, 3]),
        push(2, 130, 0, [], [2]),
    ]),
    Sequence("line 12: 'or all workers have responded', before the timeout",
        "psp", 3, "psp:2,0.5,push_timeout=100e-9", version=1, events=[
        push(0, 10, 0, [], []),
        push(1, 20, 0, [], [], due=120),
        push(2, 119, 0, [0, 1, 2], [0, 1, 2]),
        push(0, 121, 1, [], []),  # the first version's timer is gone
        push(1, 121, 1, [], [], due=221),
    ]),
    Sequence("line 7: 'if t' < t then drop', so t' > t counts: a worker that went on is in one sum twice",
        "psp", 3, "psp:3,0.5,push_timeout=50e-9", version=1, dropped={0: 0, 1: 0, 2: 1}, events=[
        push(0, 10, 0, [], []),
        push(0, 20, 1, [], []),
        push(1, 30, 0, [], [], due=80),
        fire([0, 0, 1], [0, 1]),
        push(2, 80, 0, [], [2]),
        push(0, 90, 1, [], []),
    ]),
    Sequence("line 8: a late push of a worker that waits is dropped, and granted once",
        "psp", 3, "psp:2,0.5", version=2, dropped={0: 1, 1: 0, 2: 0}, events=[
        push(0, 1, 0, [], []),
        push(1, 1, 0, [0, 1], [0, 1]),
        push(0, 2, 1, [], []),
        push(0, 3, 0, [], [0]),
        push(2, 4, 1, [0, 2], [2]),
    ]),
    Sequence("line 8: 'Drop g'': a dropped gradient is no response, and an event out of time counts at the latest time",
        "psp", 2, "psp:1,0.5,push_timeout=40e-9", version=2, dropped={0: 0, 1: 2}, events=[
        push(0, 100, 0, [], [], due=140),
        fire([0], [0]),
        push(1, 120, 0, [], [1]),  # late in both senses: it counts at 140
        push(0, 130, 1, [], [], due=180),
        push(1, 150, 0, [], [1], due=180),
        push(1, 179, 1, [0, 1], [0, 1]),
    ]),
    Sequence("a leave completes the sum; a leaver's gradient stays in it",
        "psp", 4, "psp:4,0.5,push_timeout=10e-9", version=2, events=[
        push(0, 1, 0, [], []),
        push(1, 2, 0, [], []),
        leave(1, 3, [], []),
        leave(2, 4, [], []),
        push(0, 5, 1, [], []),  # two workers live; only 0 has responded
        leave(3, 6, [0, 0, 1], [0]),
        push(0, 7, 1, [0], [0]),
        leave(0, 8, [], []),
    ]),
    Sequence("of the live workers as many are passed by as at first (fastps' choice); a leaver's gradient is one of the c",
        "psp", 4, "psp:3,0.5", version=2, dropped={0: 0, 1: 0, 2: 1}, events=[
        push(0, 1, 0, [], []),
        leave(3, 2, [], []),  # three live, so two are enough
        push(1, 3, 0, [0, 1], [0, 1]),
        push(2, 4, 0, [], [2]),
        push(0, 5, 1, [], []),
        leave(0, 6, [], []),  # two live, so one is
        push(1, 7, 1, [0, 1], [1]),
    ]),
    Sequence("a leave may be what the timer begins with",
        "psp", 3, "psp:2,0.5,push_timeout=10e-9", version=1, events=[
        push(0, 1, 0, [], []), leave(2, 5, [], [], due=15), fire([0], [0]),
    ]),
    Sequence("a leaver's gradient keeps the timer running",
        "psp", 2, "psp:1,0.5,push_timeout=10e-9", version=2, dropped={1: 1}, events=[
        push(0, 1, 0, [], [], due=11),
        leave(0, 2, [], [], due=11),
        fire([0], []),
        push(1, 11, 0, [], [1]),
        push(1, 12, 1, [1], [1]),
    ]),
]
