"""Worked out by hand: softsync with grants staggered as in R2SP."""

from tests.oracles.by_hand.events import Sequence, fire, leave, push

# fmt: off
STAGGERED = [
    Sequence("folded together, granted apart", "staggered", 2, "softsync:1,stagger=1", version=2, events=[
        push(0, 0, 0, [], [0]),  # its gradient is in no fold yet
        push(1, 0, 0, [0, 1], [1]),
        push(1, 100, 1, [], []),
        push(0, 100, 0, [0, 1], [0], due=150),
        fire([], [1]),
    ]),
    Sequence("two gradients of one learner in a sum; a leave passes the turn on",
        "staggered", 3, "softsync:1,stagger=1", version=1, events=[
        push(0, 1, 0, [], [0]),
        push(0, 2, 0, [], []),
        push(1, 3, 0, [0, 0, 1], [1]),  # T = 1, a gap of 0
        leave(2, 4, [], [0]),
    ]),
    Sequence("a leave completes the sum", "staggered", 2, "softsync:1,stagger=1", version=3, events=[
        push(0, 1, 0, [], [0]), leave(1, 2, [0], []), push(0, 3, 1, [0], [0]), push(0, 4, 2, [0], [], due=5),
    ]),
    Sequence("folds keep no order", "staggered", 2, "softsync:2,stagger=1", version=4, events=[
        push(1, 1, 0, [1], []), push(0, 2, 0, [0], [0, 1]), push(1, 2, 2, [1], []), push(0, 2, 2, [0], [0, 1]),
    ]),
]
