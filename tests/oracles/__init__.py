"""The papers' pseudo-code in plain Python, one discipline a file.

The compiled scheduler must agree with these decision by decision (tests/kernels/scheduling/test_scheduler.py and
test_scheduler_timed.py), and those of the timed disciplines with answers by hand (test_by_hand.py). They are written to
be read beside the paper: no speed, no arrays, no cleverness, and nothing shared with the code that they judge.
"""
