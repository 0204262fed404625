"""A Muon that multiplies in float32, for tests: torch's own does so in bfloat16."""

from typing import Any

import torch


class Muon(torch.optim.Optimizer):
    """Along the orthogonalized momentum, for matrices."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                wide = p.grad.lerp(buffer, group["momentum"])
                wide = wide / wide.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = wide @ wide.T
                    wide = 3.4445 * wide + (2.0315 * gram @ gram - 4.775 * gram) @ wide
                p.add_(wide, alpha=-group["lr"])
