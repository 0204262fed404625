"""fastps.lab.measuring: what a machine and its links can do, as `fastps doctor --nodes` and `--script` measure it.

Border: figures and sentences about them; it changes no job. Arrows: it imports fastps.network, fastps.advice and
fastps.processes, and no other folder of fastps.lab.
"""
