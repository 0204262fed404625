"""fastps.bench.gpu: the GPU check as a whole: its parts' processes, its report, the machine around it, and what joins GPUs.

Border: it starts no jobs of workers; parts of the check do, in their own processes. Arrows: it imports fastps.
"""
