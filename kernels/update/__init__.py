"""fastps.kernels.update: the fold (sum of gradients and update rule in one pass), and compiled user rules.

It knows arrays and no arena. Arrows: it includes base.
"""
