"""Worked out by hand: softsync and hardsync, which sum a fixed number of pushes and drop none."""

from tests.oracles.by_hand.events import Sequence, leave, push

# fmt: off
SOFTSYNC = [
    Sequence("the first c gradients of whoever sends them",
        "softsync", 4, "softsync:2", version=3, dropped={0: 0, 1: 0, 2: 0, 3: 0}, events=[
        push(3, 1, 0, [], [3]),
        push(3, 2, 0, [3, 3], [3]),
        push(0, 2, 0, [], [0]),
        push(3, 2, 1, [0, 3], [3]),
        push(1, 3, 0, [], [1]),
        push(2, 4, 0, [1, 2], [2]),  # two versions late, and not dropped
    ]),
    Sequence("n = lambda is Async", "softsync", 2, "softsync:2", version=3, events=[
        push(1, 1, 0, [1], [1]), push(1, 1, 1, [1], [1]), push(0, 1, 0, [0], [0]),
    ]),
    Sequence("c = floor(5 / 2) = 2, and at least 1", "softsync", 5, "softsync:2", version=3, events=[
        push(4, 1, 0, [], [4]),
        push(2, 2, 0, [2, 4], [2]),
        leave(0, 3, [], []),
        leave(1, 3, [], []),  # floor(3 / 2) = 1
        push(4, 4, 1, [4], [4]),
        leave(2, 5, [], []),
        leave(3, 5, [], []),  # floor(1 / 2) = 0, so 1
        push(4, 6, 2, [4], [4]),
    ]),
    Sequence("a leave makes c small enough for what is there", "softsync", 3, "softsync:1", version=2, events=[
        push(0, 1, 0, [], [0]),
        push(0, 2, 0, [], [0]),
        leave(0, 3, [0, 0], []),
        push(2, 4, 1, [], [2]),
        leave(1, 5, [2], []),
        leave(2, 6, [], []),
    ]),
    Sequence("alone, every gradient is a fold", "softsync", 2, "softsync:1", version=1, events=[
        leave(1, 1, [], []), push(0, 2, 0, [0], [0]), leave(0, 2, [], []),
    ]),
]

HARDSYNC = [
    Sequence("one gradient of each", "hardsync", 3, "hardsync:8", version=1, events=[
        push(2, 1, 0, [], []), push(0, 2, 0, [], []), push(1, 3, 0, [0, 1, 2], [0, 1, 2]), push(1, 3, 1, [], []),
    ]),
    Sequence("one learner", "hardsync", 1, "hardsync:8", [push(0, 1, 0, [0], [0]), push(0, 1, 1, [0], [0])], version=2),
        Sequence("a leave completes the version", "hardsync", 3, "hardsync:8", version=1, events=[
        push(0, 1, 0, [], []), push(1, 1, 0, [], []), leave(2, 1, [0, 1], [0, 1]), push(0, 2, 1, [], []),
    ]),
    Sequence("a leaver's gradient stays", "hardsync", 2, "hardsync:8", version=1, events=[
        push(0, 1, 0, [], []), leave(0, 2, [], []), push(1, 3, 0, [0, 1], [1]), leave(1, 4, [], []),
    ]),
]
