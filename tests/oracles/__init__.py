"""The papers' pseudo-code in plain Python, one discipline a file.

The compiled scheduler must agree with these decision by decision (tests/kernels/test_scheduler.py). They are written
to be read beside the paper: no speed, no arrays, no cleverness, and nothing shared with the code that they judge.
"""
