"""fastps.kernels.cuda: the fold on a GPU, and the same source compiled for the CPU as its test.

Arrows: it imports update.
"""
