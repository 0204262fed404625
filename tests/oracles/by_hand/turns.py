"""Worked out by hand: R2SP's turns and gaps."""

from tests.oracles.by_hand.events import Sequence, fire, join, leave, push

# A worker's first iteration is no sample, so T is known from the earliest second push on. Timestamps have no effect here and
# are 0.
# fmt: off
R2SP = [
    Sequence(
        "section III.C: 'workers make updates in a fixed round-robin order': updates wait for their turn and follow at once",
        "r2sp", 3, "r2sp:1", version=3, events=[
        push(2, 5, 0, [], []),
        push(1, 6, 0, [], []),
        push(0, 7, 0, [0, 1, 2], [0, 1, 2]),  # T is unknown: no gap
    ]),
    Sequence("section III.B: 'the gap between two consecutive updates is set to T/N': permissions are that far apart",
        "r2sp", 3, "r2sp:1", version=7, events=[
        push(0, 10, 0, [0], [0]),
        push(1, 10, 0, [1], [1]),
        push(2, 10, 0, [2], [2]),
        push(2, 310, 0, [], []),  # T = 300
        push(0, 310, 0, [0], [0]),  # the previous permission was at 10
        push(1, 310, 0, [1, 2], [], due=410),
        fire([], [1], due=510),
        fire([], [2]),
        push(0, 610, 0, [0], [0]),  # at 510 + 100 exactly
    ]),
    Sequence("section V: 'we relax the update gap from T/N to rT/N', in whole ns", "r2sp", 2, "r2sp:0.8", version=5, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 100, 0, [0], [0]),
        push(1, 139, 0, [1], [], due=155),  # T = 139: 0.8 * 139 / 2 = 55.6
        fire([], [1]),
        push(0, 210, 0, [0], [0]),  # 155 + 55
    ]),
    Sequence("section V: 'the EMA method to accurately learn the value of T': by an eighth, in whole ns, towards the old value",
        "r2sp", 1, "r2sp:1", version=5, events=[
        push(0, 0, 0, [0], [0]),
        push(0, 100, 0, [0], [0]),  # T = 100
        push(0, 131, 0, [0], [], due=192),  # 31 after 100: -69 / 8 is -8, T = 92
        fire([], [0]),
        push(0, 307, 0, [0], [0]),  # 115 after 92: 23 / 8 is 2, T = 94; 192 + 94 is past
        push(0, 309, 0, [0], [], due=390),  # 2 after 94: -92 / 8 is -11, T = 83
    ]),
    Sequence("an event out of time counts at the latest time", "r2sp", 2, "r2sp:1", version=4, events=[
        push(0, 100, 0, [0], [0]),
        push(1, 50, 0, [1], [1]),  # at 100
        push(0, 200, 0, [0], [0]),
        push(1, 150, 0, [1], [], due=250),  # at 200: T = 100, the previous permission was at 200
        fire([], [1]),
    ]),
    Sequence("a leaver's push is folded first, and its turns are skipped", "r2sp", 3, "r2sp:0", version=4, events=[
        push(2, 1, 0, [], []),
        push(1, 2, 0, [], []),
        leave(2, 3, [2], []),
        push(0, 4, 0, [0, 1], [0, 1]),
        push(0, 5, 0, [0], [0]),
    ]),
    Sequence("who held both turns leaves", "r2sp", 3, "r2sp:0", version=5, events=[
        push(2, 1, 0, [], []),
        push(1, 1, 0, [], []),
        leave(0, 2, [1, 2], [1, 2]),
        push(2, 3, 0, [], []),
        push(1, 4, 0, [1, 2], [1, 2]),
        leave(1, 5, [], []),
        push(2, 6, 0, [2], [2]),
        leave(2, 7, [], []),
    ]),
    Sequence("a leave folds the leaver's push and then what waited behind it", "r2sp", 3, "r2sp:0", version=5, events=[
        push(0, 1, 0, [0], [0]),
        push(0, 2, 0, [], []),
        push(2, 3, 0, [], []),
        leave(1, 4, [2, 0], [0, 2]),
        push(0, 5, 0, [], []),
        leave(0, 6, [0], []),
        push(2, 7, 0, [2], [2]),
    ]),
    Sequence("section III.B: 'let N be the number of workers and T the timespan': the slowest leaves, so both are smaller",
        "r2sp", 3, "r2sp:1", version=8, events=[
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
    ]),
    Sequence("section III.B: 'the gap between two consecutive updates': a joiner's first step keeps it, and so does the next",
        "r2sp", 3, "r2sp:1", version=5, events=[
        leave(2, 0, [], []),
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 300, 0, [0], [0]),  # T = 300
        join(2, 310, [], due=400),  # N = 3: the last permission was at 300
        push(1, 320, 0, [1], [], due=406),  # T = 320
        fire([], [2], due=512),
        push(0, 410, 0, [0], [], due=512),
        fire([], [1], due=618),
    ]),
    Sequence("the slowest leaves, and the smaller gap has passed", "r2sp", 3, "r2sp:1", version=7, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(2, 0, 0, [2], [2]),
        push(0, 90, 0, [0], [0]),
        push(1, 150, 0, [1], [1]),
        push(2, 600, 0, [2], [2]),
        push(0, 620, 0, [0], [], due=800),
        leave(2, 700, [], [0]),
    ]),
]
