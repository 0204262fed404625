"""fastps.bench: benchmarks of the kernels, the protocol and whole jobs, beside other ways to synchronize.

Border: it prints figures and judges nothing; it is never a test.
"""
