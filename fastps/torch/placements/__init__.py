"""fastps.torch.placements: where a wrapped model's memory lies, and how its gradients and weights come to the arena and back.

Border: what a step does is the optimizer's. Arrows: of fastps.torch they import joining, gradients and weights.
"""
