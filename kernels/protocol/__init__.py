"""fastps.kernels.protocol: a lane as its worker uses it: pins, posts, waits, all shard locks; and a reader's pins.

Arrows: it imports combining and what is below it.
"""
