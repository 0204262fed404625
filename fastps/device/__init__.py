"""fastps.device: jobs in GPU memory. The device interface, its CUDA implementation, and the store on top of it.

Border: it decides nothing about staleness; the scheduler in the arena does. Arrows: it imports fastps.store and the packages
below it.
"""
