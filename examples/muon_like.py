"""A user-defined rule with sums over a parameter: momentum of one size, which is what remains of Muon without its matrices.

Muon makes the momentum of a weight matrix orthogonal by products of matrices (Newton-Schulz) and scales the result. A rule sees
elements and sums over them, and cannot multiply matrices. So this is not Muon: the step has the direction of the momentum.

It has Muon's size. The root of the mean square of a parameter's step is 0.2 times the learning rate, which is that of an
orthogonal matrix under torch.optim.Muon's adjust_lr_fn="match_rms_adamw". Weight decay is decoupled, as there.
"""

import math

import torch

import fastps

STEPS = 200


def squares(weight, gradient, momentum_buffer, learning_rate, momentum, weight_decay):
    """Return one element's terms of the two sums: the square of Nesterov's momentum, and 1, to count the elements."""
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    direction = momentum * momentum_buffer + (1 - momentum) * gradient
    return direction * direction, 1.0


@fastps.rule(state=("momentum_buffer",), hyper=("learning_rate", "momentum", "weight_decay"), sums=squares)
def muon_like(weight, gradient, momentum_buffer, learning_rate, momentum, weight_decay, total, count):
    """Step along Nesterov's momentum, scaled so that the mean square over the parameter is 0.04."""
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    direction = momentum * momentum_buffer + (1 - momentum) * gradient
    scale = 0.2 * math.sqrt(count / total) if total > 0 else 0
    return weight * (1 - learning_rate * weight_decay) - learning_rate * scale * direction, momentum_buffer


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
rule = fastps.RuleOptimizer(model.parameters(), muon_like, learning_rate=0.1, momentum=0.95, weight_decay=0.1)
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
