"""fastps.lab.demo: the demo job: small real datasets and models, one worker's training loop, and comparisons of disciplines.

Border: nothing outside of the command line needs it. Arrows: it imports fastps.torch, fastps.processes and fastps.simulation.
"""
