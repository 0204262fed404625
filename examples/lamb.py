"""A user-defined rule with sums over a parameter: LAMB (arXiv 1904.00962, algorithm 2), Adam with a trust ratio for each layer.

The step of a layer is as long as its learning rate times the norm of its weights, whatever the gradient's size. The two norms
are sums over a whole parameter: `squares` says what one element adds to them.
"""

import math

import torch

import fastps

STEPS = 300


def squares(weight, gradient, exp_avg, exp_avg_sq, learning_rate, beta1, beta2, epsilon, weight_decay, step):
    """Return one element's terms of the two sums: the square of the weight, and that of Adam's direction with weight decay."""
    mean = (beta1 * exp_avg + (1 - beta1) * gradient) / (1 - beta1**step)
    square = (beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient) / (1 - beta2**step)
    direction = mean / (math.sqrt(square) + epsilon) + weight_decay * weight
    return weight * weight, direction * direction


@fastps.rule(
    state=("exp_avg", "exp_avg_sq"),
    hyper=("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "step"),
    sums=squares,
)
def lamb(weight, gradient, exp_avg, exp_avg_sq, learning_rate, beta1, beta2, epsilon, weight_decay, step, weights, directions):
    """Step along Adam's direction, with the ratio of the norms as a factor; without it where a norm is zero."""
    exp_avg = beta1 * exp_avg + (1 - beta1) * gradient
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * gradient * gradient
    mean, square = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)
    direction = mean / (math.sqrt(square) + epsilon) + weight_decay * weight
    ratio = math.sqrt(weights / directions) if weights > 0 and directions > 0 else 1
    return weight - learning_rate * ratio * direction, exp_avg, exp_avg_sq


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
options = {"learning_rate": 0.05, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01}
rule = fastps.RuleOptimizer(model.parameters(), lamb, **options)
optimizer = fastps.DistributedOptimizer(rule, model=model)
schedule = torch.optim.lr_scheduler.LinearLR(rule, 1.0, 0.01, STEPS)  # steps of a given size do not shrink by themselves
generator = torch.Generator().manual_seed(fastps.rank())
for _ in range(STEPS):
    points = torch.randn(64, 2, generator=generator)
    labels = (points.norm(dim=1) > 1.2).long()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(points), labels).backward()
    optimizer.step()
    schedule.step()
optimizer.close()
points = torch.randn(10_000, 2, generator=torch.Generator().manual_seed(99))
right = model(points).argmax(1) == (points.norm(dim=1) > 1.2)
print(
    f"worker {fastps.rank()} of {fastps.world_size()}: {100 * right.float().mean():.1f} % inside or outside the circle are told"
)
