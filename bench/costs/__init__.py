"""fastps.bench.costs: what looking at a job costs it.

Border: it runs jobs with and without a look, and compares them. Arrows: it imports fastps.
"""
