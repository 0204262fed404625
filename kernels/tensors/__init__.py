"""fastps.kernels.tensors: loops over a model's tensors, compiled against torch or by attributes.

Arrows: it imports nothing of fastps.
"""
