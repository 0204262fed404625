"""The papers' pseudo-code in plain Python, one discipline per file.

The compiled scheduler must agree with these oracles decision by decision (tests/kernels/scheduling), and the oracles of the
timed disciplines must agree with answers worked out by hand. Read an oracle beside its paper: it is plain, uses no arrays, is
not optimized, and shares nothing with the code under test. Its module's `PLAYS` says which specs it plays; tests find it there.
"""
