"""fastps.processes: start the workers of a job, show their output, replace the lost ones, end them.

Border: it knows processes, not tensors. Arrows: it imports fastps.store, fastps.device and what is below them.
"""
