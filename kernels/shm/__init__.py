"""fastps.kernels.shm: the arena in shared memory: its layout, its format, and its control words.

It decides nothing. Arrows: it imports base, scheduling, update and rows.
"""
