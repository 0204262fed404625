"""fastps.kernels.chaos: a simulated world of workers that run the real protocol under injected deaths; failpoint build only.

Arrows: it imports protocol and what is below it.
"""
