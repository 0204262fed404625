"""fastps.bench.gpu: what runs on a GPU: the check with its parts, processes and report, the benchmarks' sides on CUDA, and what
a CUDA compiler makes of the kernels.

Border: what a benchmark measures without a GPU, too, is a level up. Arrows: it imports fastps and its parent.
"""
