"""fastps.lab.worlds: simulated worlds for `fastps chaos`: workers, servers, devices and nodes, each with its faults and checks.

Border: a seed decides everything that happens in a world; no world reads a clock. Arrows: it imports fastps.lab.gpus,
fastps.store, fastps.device and fastps.network.
"""
