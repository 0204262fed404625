"""fastps.lab.gpus: stand-ins for GPUs, in host memory, and the rules that CUDA and its streams demand.

Border: they stand for CUDA under fastps.device.cuda, and know no shards and no workers.
Arrows: it imports fastps.device.
"""
