"""fastps.telemetry: the figures of a running job under fixed names, written where other tools read them.

Border: it reads the arena's counters and asks nothing of the workers. Arrows: it imports fastps.store and what is below it.
"""
