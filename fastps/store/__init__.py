"""fastps.store: push, wait for a grant, pull: the store that the workers of a job share, and the worker.

Border: it knows arrays and no torch. Arrows: it imports fastps.membership, fastps.tracing and what they import.
"""
