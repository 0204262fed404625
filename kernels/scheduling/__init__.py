"""fastps.kernels.scheduling: which push is folded and which worker is granted a step, by each discipline.

It knows numbers of workers and clocks, not gradients. Arrows: it includes base.
"""
