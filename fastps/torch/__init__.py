"""fastps.torch: the optimizer that a torch training loop wraps, and what it needs to know of torch.

Border: it starts no process. Arrows: it imports fastps.store, fastps.checkpoint, fastps.device and fastps.advice.
"""
