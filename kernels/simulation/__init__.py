"""fastps.kernels.simulation: a discrete-event simulator that drives the compiled scheduler in virtual time.

Arrows: it imports scheduling and shm.
"""
