"""fastps.checkpoint: a job's state in a file: the format, a consistent copy of a running job, and periodic writing.

Border: it knows no torch; fastps.torch.checkpoint translates. Arrows: it imports fastps.store and what is below it.
"""
