"""fastps.lab.virtual: real training in virtual time, for `fastps simulate --train` and `--script`, `replay`, and the papers.

It also reads the options of `fastps simulate`, which are texts with units.

Border: times come from the simulation. The weights of a built-in model come from its replay, in the caller's process. Those of
a script come from its own worker processes, for which a driver plays the simulation's events, or a trace's. Arrows: it imports
fastps.simulation, fastps.store, fastps.processes, fastps.tracing and fastps.lab.demo.
"""
