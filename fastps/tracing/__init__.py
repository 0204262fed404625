"""fastps.tracing: the record of a run: written by workers, merged, checked against a policy, summarized and exported.

Border: it reads and writes records and decides nothing. Arrows: it imports fastps.job, fastps.membership and fastps.system.
"""
