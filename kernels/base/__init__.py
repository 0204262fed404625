"""fastps.kernels.base: every access to shared memory (atomics.h), the failpoints that tests put on them,
and random numbers that follow from a seed.

Arrows: it includes nothing of fastps.
"""
