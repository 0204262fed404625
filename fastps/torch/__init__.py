"""fastps.torch: the optimizer that wraps a torch optimizer, and everything in fastps that depends on torch.

Border: it starts no process. Arrows: it imports fastps.store, fastps.checkpoint, fastps.device and fastps.advice.
"""
