"""fastps.bench.gpu: what the GPU check does between several GPUs, and the table of what has run on them.

Border: no jobs of workers; the check itself starts those. Arrows: it imports fastps.
"""
