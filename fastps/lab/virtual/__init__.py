"""fastps.lab.virtual: real training in virtual time, for `fastps simulate --train` and the papers.

Border: times come from the simulation and weights from its replay; no process but the caller's runs. Arrows: it imports
fastps.simulation and fastps.training.
"""
