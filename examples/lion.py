"""A user-defined rule with torch: Lion (arXiv 2302.06675), which follows the sign of an interpolated momentum.

It has one state tensor, half of Adam's. Its steps are all of one size, so its learning rate is a tenth of Adam's.
"""

import math

import torch

import fastps

STEPS = 500


@fastps.rule(state=("exp_avg",), hyper=("learning_rate", "beta1", "beta2", "weight_decay"))
def lion(weight, gradient, exp_avg, learning_rate, beta1, beta2, weight_decay):
    """Step by the sign of the mean of gradients, with this step's weighed by 1 - beta1; decay the weight decoupled."""
    direction = beta1 * exp_avg + (1 - beta1) * gradient
    weight = weight * (1 - learning_rate * weight_decay)
    if direction != 0:
        weight = weight - learning_rate * math.copysign(1, direction)
    return weight, beta2 * exp_avg + (1 - beta2) * gradient


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
rule = fastps.RuleOptimizer(model.parameters(), lion, learning_rate=3e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
optimizer = fastps.DistributedOptimizer(rule, model=model)
generator = torch.Generator().manual_seed(fastps.rank())
for _ in range(STEPS):
    points = torch.randn(64, 2, generator=generator)
    labels = (points.norm(dim=1) > 1.2).long()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
optimizer.close()
points = torch.randn(10_000, 2, generator=torch.Generator().manual_seed(99))
right = model(points).argmax(1) == (points.norm(dim=1) > 1.2)
print(
    f"worker {fastps.rank()} of {fastps.world_size()}: {100 * right.float().mean():.1f} % inside or outside the circle are told"
)
