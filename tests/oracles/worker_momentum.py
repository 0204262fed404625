"""DANA-slim: the momentum of each worker, of its own gradients (Hakimi et al. 2019, section 4.2), in plain Python.

A worker keeps v = mu v + g and sends g + mu v. The server takes the mean of what it folds and makes a step of plain SGD. The
oracle knows which pushes are folded, in which order, and which weights each was computed with; not how that was decided.
"""

from collections.abc import Callable, Sequence

Vector = list[float]


class DanaSlim:
    """The weights of each version, and the momentum of each worker."""

    def __init__(self, weights: Vector, workers: int, rate: float, mu: float) -> None:
        self.weights = [weights]
        self.rate, self.mu = rate, mu
        self.v = [[0.0] * len(weights) for _ in range(workers)]
        self.sent: list[list[Vector]] = [[] for _ in range(workers)]

    def push(self, worker: int, read: int, gradient: Callable[[int, Vector], Vector]) -> None:
        """The worker computes with version `read`, and sends."""
        g = gradient(worker, self.weights[read])
        v = self.v[worker] = [self.mu * old + new for old, new in zip(self.v[worker], g, strict=True)]
        self.sent[worker].append([new + self.mu * own for new, own in zip(g, v, strict=True)])

    def fold(self, workers: Sequence[int], divisor: float) -> None:
        """The server takes the oldest push of each of these workers; softsync divides the rate."""
        pushes = [self.sent[worker].pop(0) for worker in workers]
        mean = [sum(values) / len(pushes) for values in zip(*pushes, strict=True)]
        rate = self.rate / divisor
        self.weights.append([w - rate * step for w, step in zip(self.weights[-1], mean, strict=True)])

    def leave(self, worker: int) -> None:
        """Another takes the worker's place, and begins without momentum."""
        self.v[worker] = [0.0] * len(self.v[worker])
