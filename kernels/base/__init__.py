"""fastps.kernels.base: every access to shared memory (atomics.h), and the failpoints that tests put on them.

Arrows: it includes nothing of fastps.
"""
