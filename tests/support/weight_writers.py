"""Training programs whose scripts write weights by themselves, and what N of them compute together in plain torch.

A program is a class: `gradient` sets p.grad from one batch, and `after` follows each step. `replicas` trains as many plain
models as there are workers, each with a program of its own, by the mean of their gradients.
"""

from typing import Any

import torch

STEPS = 12
Batch = tuple[torch.Tensor, torch.Tensor]


def batch_of(step: int, worker: int) -> Batch:
    """The batch of one worker in one step."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    inputs = torch.randn(8, 4, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) + 1


class Program:
    """Plain SGD. `model` holds all parameters that the optimizer gets."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = self.make()
        self.parameters = list(self.model.parameters())

    def make(self) -> torch.nn.Module:
        """The model."""
        return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer."""
        return torch.optim.SGD(self.parameters, lr=0.05, momentum=0.9)

    def loss(self, batch: Batch) -> torch.Tensor:
        """The loss of one batch."""
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def gradient(self, batch: Batch) -> None:
        """Set p.grad."""
        self.loss(batch).backward()

    def after(self, step: int) -> None:
        """What the script does after a step."""


class Lookahead(Program):
    """Zhang et al. 2019, as its common implementations write it: through `.data`."""

    def after(self, step: int) -> None:
        if step == 0:
            self.slow = [p.data.clone() for p in self.parameters]
        if step % 3 == 2:
            for p, slow in zip(self.parameters, self.slow, strict=True):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


class SharpnessAware(Program):
    """SAM by `p.data = old`."""

    def gradient(self, batch: Batch) -> None:
        self.loss(batch).backward()
        old = [p.data for p in self.parameters]
        gradients = [p.grad.clone() for p in self.parameters if p.grad is not None]
        for p, gradient in zip(self.parameters, gradients, strict=True):
            p.data = p.data + 0.05 * gradient / (gradient.norm() + 1e-12)
            p.grad = None
        self.loss(batch).backward()
        for p, value in zip(self.parameters, old, strict=True):
            p.data = value


class SharpnessAwareInPlace(Program):
    """SAM that perturbs in place and takes the perturbation back."""

    def gradient(self, batch: Batch) -> None:
        self.loss(batch).backward()
        old = [p.data.clone() for p in self.parameters]
        for p in self.parameters:
            assert p.grad is not None
            p.data.add_(p.grad, alpha=0.05)
            p.grad = None
        self.loss(batch).backward()
        for p, value in zip(self.parameters, old, strict=True):
            p.data.copy_(value)


class LayerwiseRates(Program):
    """LARC: the gradient is scaled by the weight's norm, through `p.grad.data`."""

    def gradient(self, batch: Batch) -> None:
        super().gradient(batch)
        for p in self.parameters:
            assert p.grad is not None
            p.grad.data += 0.01 * p.data
            p.grad.data *= 0.02 * p.data.norm() / (p.grad.data.norm() + 1e-8)


class ProjectedConflicts(Program):
    """PCGrad: two losses, whose gradients are projected and set by hand."""

    def gradient(self, batch: Batch) -> None:
        losses = (self.loss(batch), self.model(batch[0]).square().mean())
        one, two = (torch.autograd.grad(loss, self.parameters) for loss in losses)
        for p, a, b in zip(self.parameters, one, two, strict=True):
            overlap = (a * b).sum()
            p.grad = a + b - (overlap / (b.norm() ** 2 + 1e-12)) * b if overlap < 0 else a + b


class Clamped(Program):
    """WGAN's clamp of the weights after each step."""

    def after(self, step: int) -> None:
        for p in self.parameters:
            p.data.clamp_(-0.2, 0.2)


class SpectralNorm(Program):
    """The old form of spectral_norm, which sets `weight` from `weight_orig` in each forward."""

    def make(self) -> torch.nn.Module:
        model = super().make()
        torch.nn.utils.spectral_norm(model[0])  # type: ignore[index]
        return model


class DeadNeurons(Program):
    """Begins the weights of one neuron anew now and then, counted by torch."""

    def after(self, step: int) -> None:
        if step % 4 == 3:
            with torch.no_grad():
                self.parameters[0][step % 6].fill_(0.1 * step)
                self.parameters[2][:, step % 6].zero_()


class TargetInOptimizer(Program):
    """A target that follows by a moving average, and that the optimizer was given: frozen (BYOL), or without a gradient."""

    frozen, how = True, "inplace"

    def make(self) -> torch.nn.Module:
        online, target = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
        target.requires_grad_(not self.frozen)
        return torch.nn.ModuleDict({"online": online, "target": target})

    def loss(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            near = self.model["target"](batch[0])  # type: ignore[index]
        return torch.nn.functional.mse_loss(self.model["online"](batch[0]), batch[1] + 0.1 * near)  # type: ignore[index]

    def after(self, step: int) -> None:
        for t, o in zip(self.parameters[2:], self.parameters[:2], strict=True):
            if self.how == "inplace":
                t.data.mul_(0.9).add_(o.data, alpha=0.1)
            elif self.how == "counted":
                with torch.no_grad():
                    t.lerp_(o, 0.1)
            else:
                t.data = 0.9 * t.data + 0.1 * o.data


class CountedTarget(TargetInOptimizer):
    """The same, in place as torch counts it."""

    frozen, how = False, "counted"


class AssignedTarget(TargetInOptimizer):
    """The same, assigned."""

    how = "assigned"


class Codebook(TargetInOptimizer):
    """Entries that follow the mean of this worker's own outputs: each worker has a codebook of its own."""

    frozen = False

    def gradient(self, batch: Batch) -> None:
        super().gradient(batch)
        self.seen = batch[0].mean(0)

    def after(self, step: int) -> None:
        self.parameters[2].data.mul_(0.9).add_(self.seen, alpha=0.1)


class Unfrozen(Program):
    """A layer that is written while it is frozen, alike by all, and trains later."""

    def after(self, step: int) -> None:
        if step == 0:
            self.parameters[0].requires_grad_(False)
        if step == 4:
            self.parameters[0].data.mul_(0.5)
        if step == 6:
            self.parameters[0].requires_grad_(True)


class AveragedByHand(Program):
    """Stochastic weight averaging: the average is shown for an evaluation, and the weights come back."""

    def after(self, step: int) -> None:
        if step == 0:
            self.sums = [torch.zeros_like(p) for p in self.parameters]
        kept = [p.data.clone() for p in self.parameters]
        for p, total in zip(self.parameters, self.sums, strict=True):
            total.add_(p.data)
            p.data.copy_(total / (step + 1))
        self.loss(batch_of(step, 0))
        for p, value in zip(self.parameters, kept, strict=True):
            p.data.copy_(value)


class Exchanged(Program):
    """Two weights of one shape change places."""

    def make(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def after(self, step: int) -> None:
        if step % 3 == 1:
            a, b = self.parameters[0], self.parameters[2]
            a.data, b.data = b.data, a.data


# Whether what a program leaves behind a step is other than what the step made of weights that are trained.
WRITES: dict[type[Program], bool] = {
    Lookahead: True,
    SharpnessAware: False,
    SharpnessAwareInPlace: False,
    LayerwiseRates: False,
    ProjectedConflicts: False,
    Clamped: True,
    SpectralNorm: False,
    DeadNeurons: True,
    TargetInOptimizer: False,
    CountedTarget: False,
    AssignedTarget: False,
    Codebook: False,
    Unfrozen: True,
    AveragedByHand: False,
    Exchanged: True,
}


def train(program: Program, optimizer: Any, rank: int, steps: int = STEPS) -> list[torch.Tensor]:
    """Train one worker, and return its parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        program.gradient(batch_of(step, rank))
        optimizer.step()
        program.after(step)
    return [p.detach().clone() for p in program.parameters]


def replicas(kind: type[Program], workers: int) -> list[list[torch.Tensor]]:
    """The parameters of each worker, in plain torch."""
    programs = [kind() for _ in range(workers)]
    optimizers = [program.optimizer() for program in programs]
    for step in range(STEPS):
        for rank, (program, optimizer) in enumerate(zip(programs, optimizers, strict=True)):
            optimizer.zero_grad()
            program.gradient(batch_of(step, rank))
        for each in zip(*(program.parameters for program in programs), strict=True):
            found = [p.grad for p in each if p.grad is not None]
            mean = torch.stack(found).mean(0) if found else None
            for p in each:
                p.grad = None if mean is None else mean.clone()
        for program, optimizer in zip(programs, optimizers, strict=True):
            optimizer.step()
            program.after(step)
    return [[p.detach().clone() for p in program.parameters] for program in programs]
