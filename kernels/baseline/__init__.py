"""fastps.kernels.baseline: the roofline loops that benchmarks compare with, and load for the scheduler; benchmarks only.

Arrows: it imports update and scheduling.
"""
