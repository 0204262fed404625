"""Optimizers whose arithmetic the compiled core does not know: one process runs their own `step()` as the fold of the job.

Its border: the rest of fastps/torch asks it for a worker's part that folds, for the state in a checkpoint, and what it refuses.
It imports `fastps.torch.weights` and what is below fastps/torch.
"""
