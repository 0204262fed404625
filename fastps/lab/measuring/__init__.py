"""fastps.lab.measuring: what a machine and its links can do, and what many nodes would do on such links.

It is behind `fastps doctor`, and behind `--links` of `simulate` and `advise`.

Border: figures and sentences about them; it changes no job. Arrows: it imports fastps.store, fastps.device,
fastps.torch, fastps.network, fastps.advice and fastps.processes, and no other folder of fastps.lab.
"""
