"""Worked out by hand: the batches that R2SP tunes. A worker's first iteration is no sample."""

from tests.oracles.by_hand.events import Sequence, push

BATCHES = [
    Sequence(
        "the batch that makes the iterations equal",
        "r2sp",
        2,
        "r2sp:0,tune=true",
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
        "r2sp:0,tune=true",
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
        "r2sp:0,tune=true",
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
        "r2sp:0,tune=true",
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
        "r2sp:0,tune=true",
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
        "r2sp:0,tune=true",
        [
            push(0, 5, 0, [0], [0], batch=3),
            push(1, 5, 0, [1], [1], batch=7),
            push(0, 5, 0, [0], [0], batch=3),
        ],
        version=3,
        batch={0: 3, 1: 7},
    ),
]
