"""fastps.kernels.memory: memory that processes share: its mapping, its NUMA nodes, and the thread that hands it to others.

It does not know what the memory holds. Arrows: it includes base.
"""
