"""fastps.system: what Linux gives a process: time, shared memory, NUMA nodes, the allocator, processes and exit handlers.

Border: it knows no job, worker or tensor. Arrows: it imports fastps.errors and compiled kernels, and no other package of
fastps.
"""
