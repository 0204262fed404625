"""fastps.kernels.update: the fold (sum of gradients and update rule in one pass), its NumPy reference, and compiled user rules.

It knows arrays and no arena. Arrows: it includes base.
"""
