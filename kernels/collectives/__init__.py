"""fastps.kernels.collectives: reductions of several arrays, and the exchange of blocks between the ranks of a process group.

It knows numbers and memory: no tensor, no process and no clock. Arrows: it includes base and update.
"""
