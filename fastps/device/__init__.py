"""fastps.device: jobs in GPU memory: the device interface, its CUDA and host implementations, and the store on it.

Border: it decides nothing about staleness; the scheduler in the arena does. Arrows: it imports fastps.store and what is
below it.
"""
