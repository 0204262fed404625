"""Worked out by hand: the batches that R2SP and bsp tune. A worker's first iteration is no sample."""

from tests.oracles.by_hand.events import Sequence, push

# fmt: off
BATCHES = [
    Sequence("the batch that makes the iterations equal",
        "r2sp", 2, "r2sp:0,tune=true", version=5, batch={0: 32, 1: 8}, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 100, 0, [0], [0]),
        push(0, 200, 0, [], []),  # twice 8 in 100: k = 12.5
        push(1, 400, 0, [1, 0], [0, 1]),  # 8 in 400
    ]),
    Sequence("a line with a constant", "r2sp", 2, "r2sp:0,tune=true", version=5, batch={0: 68, 1: 8}, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 100, 0, [0], [0]),
        push(0, 320, 0, [], [], batch=32),  # 8 in 100 and 32 in 220: 60 + 5 b
        push(1, 400, 0, [1, 0], [0, 1]),  # 60 + 5 * 68 = 400
    ]),
    Sequence("larger batches in less time are no line", "r2sp", 2, "r2sp:0,tune=true", version=5, batch={0: 33, 1: 8}, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 200, 0, [0], [0]),
        push(0, 300, 0, [], [], batch=16),  # 7/8 of 8 and 16 in 7/8 of 200 and 100: 23 in 275
        push(1, 400, 0, [1, 0], [0, 1]),  # 33.45
    ]),
    Sequence("a line below nothing at batch 0 is none", "r2sp", 2, "r2sp:0,tune=true", version=5, batch={0: 47, 1: 8}, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 100, 0, [0], [0]),
        push(0, 500, 0, [], [], batch=16),  # k would be 37.5 and a -200; so 23 in 7/8 of 100 and 400: 487.5
        push(1, 1010, 0, [1, 0], [0, 1]),  # 47.65
    ]),
    Sequence("section V: 'the EMA method': a worker that becomes slower is known as slower",
        "r2sp", 2, "r2sp:0,tune=true", version=5, batch={0: 12, 1: 8}, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 100, 0, [0], [0]),
        push(1, 400, 0, [1], [1]),  # 8 in 400
        push(0, 500, 0, [0], [0]),  # 8 in 400 after 8 in 100: k = (7/8 * 100 + 400) / 15 = 32.5, and 12.3 in 400
    ]),
    Sequence("sixteen times the base batch at most", "r2sp", 2, "r2sp:0,tune=true", version=5, batch={0: 128, 1: 8}, events=[
        push(0, 0, 0, [0], [0]),
        push(1, 0, 0, [1], [1]),
        push(0, 8, 0, [0], [0]),
        push(0, 16, 0, [], []),
        push(1, 4000, 0, [1, 0], [0, 1]),
    ]),
    Sequence("LB-BSP: a sum of 16 in which both take equally long",
        "level", 2, "bsp,tune=true", version=2, batch={0: 12, 1: 4}, events=[
        push(0, 0, 0, [], []),
        push(1, 0, 0, [0, 1], [0, 1]),
        push(0, 80, 1, [], []),  # 8 in 80: 12 in 120
        push(1, 240, 1, [0, 1], [0, 1]),  # 8 in 240: 4 in 120
    ]),
    Sequence("LB-BSP: with constants, each sample to the worker that is soonest done with one more",
        "level", 2, "bsp,tune=true", version=3, batch={0: 13, 1: 4}, events=[
        push(0, 0, 0, [], []),
        push(1, 0, 0, [0, 1], [0, 1], batch=9),
        push(0, 100, 1, [], []),
        push(1, 250, 1, [0, 1], [0, 1], batch=9),
        push(0, 390, 2, [], [], batch=12),  # 8 in 100 and 12 in 140: 20 + 10 b, so 150 for 13
        push(1, 410, 2, [0, 1], [0, 1], batch=5),  # 9 in 250 and 5 in 160: 47.5 + 22.5 b, so 137.5 for 4 and 160 for 5
    ]),
    Sequence("without a sample, or a time in it, the base batch",
        "r2sp", 2, "r2sp:0,tune=true", version=3, batch={0: 3, 1: 7}, events=[
        push(0, 5, 0, [0], [0], batch=3), push(1, 5, 0, [1], [1], batch=7), push(0, 5, 0, [0], [0], batch=3),
    ]),
]
