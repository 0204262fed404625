"""fastps.job: a job as data: the layout of its parameters, its policy, update rule, limits and fault policy.

Border: values and their checks only; nothing here waits, maps memory or starts a process. Arrows: it imports fastps.system and
compiled kernels.
"""
