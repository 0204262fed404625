"""The fold's kernels on one core, beside the plain C loop that is their roofline and torch's fused optimizers.

The loop writes fresh buffers, as the fold must (readers still use the old weights); the better of its two kinds of stores is
the roofline. torch's optimizers write in place, which is less work. Some folds write the weights once more in half precision,
which is more. Allocation, Python and other processes are not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from fastps.bench.measure import BenchOptions, Floats, Row, aligned, check, interleaved, repeated, whole_lines
from fastps.kernels.baseline import roofline
from fastps.kernels.update import fold

LEARNING_RATE, MOMENTUM, BETA2, EPSILON = 0.01, 0.9, 0.999, 1e-8
Side = Callable[[int], None]


@dataclass(frozen=True)
class Kernel:
    """One kernel: its number of state planes (2 is Adam), and the number of gradients summed first."""

    name: str
    planes: int
    gradients: int

    @property
    def floats_moved(self) -> int:
        """Floats read and written for one parameter: gradients in, weights and state in and out."""
        return self.gradients + 2 * (1 + self.planes)


KERNELS = (Kernel("sgd-momentum", 1, 1), Kernel("adam", 2, 1), Kernel("sum-4-sgd-momentum", 1, 4))


class Case:
    """A kernel's inputs at one size, and the sides that use them."""

    def __init__(self, kernel: Kernel, size: int) -> None:
        random = np.random.default_rng(0)
        self.kernel = kernel
        self.size = whole_lines(size)
        self.gradients = list(aligned(kernel.gradients, self.size))
        self.weights = aligned(1, self.size)[0]
        for array in (*self.gradients, self.weights):
            array[:] = random.standard_normal(self.size, np.float32)
        self.state = aligned(kernel.planes, self.size)
        self.outputs: dict[str, tuple[Floats, Floats]] = {}

    def _outputs(self, name: str) -> tuple[Floats, Floats]:
        self.outputs[name] = aligned(1, self.size)[0], aligned(self.kernel.planes, self.size)
        self.outputs[name][0][:] = self.outputs[name][1][:] = 1.0  # touch every page before the clock runs
        return self.outputs[name]

    def fold(self, name: str, streaming: bool, shown_type: int = fold.FLOAT32) -> Side:
        """Make the side of fastps' fold with one kind of stores; a job chooses the kind by its size."""
        halves = None if shown_type == fold.FLOAT32 else aligned(1, self.size)[0].view(np.uint16)[: self.size]
        is_adam = self.kernel.planes == 2
        hyper = (LEARNING_RATE, 0.0 if is_adam else MOMENTUM, 0.0, 0.0, MOMENTUM, BETA2, EPSILON, 0.0, 0)
        steps = np.full(1, 0 if is_adam else 1, np.int64)  # not SGD's first step, which would read no momentum
        weights_out, state_out = self._outputs(name)
        folding = fold.Folding(
            fold.RULE_ADAM if is_adam else fold.RULE_SGD,
            fold.FOLD_SUM,
            [(0, self.size, 0)],
            [(gradient, [hyper], [True], 1.0) for gradient in self.gradients],
            self.weights,
            self.state,
            steps,
            weights_out,
            state_out,
            steps.copy(),
            streaming=streaming,
            shown_type=shown_type,
            halves_out=halves,
        )
        return lambda times: folding.run(0, self.size, times)

    def loop(self, name: str, streaming: bool) -> Side:
        """Make the side of the roofline with one kind of stores."""
        loop = roofline.Loop(
            self.gradients,
            self.weights,
            self.state,
            *self._outputs(name),
            learning_rate=LEARNING_RATE,
            momentum=MOMENTUM,
            beta2=BETA2,
            epsilon=EPSILON,
        )
        return lambda times: loop.run(0, self.size, streaming, times)

    def torch_fused(self) -> Side:
        """Make the side of torch's fused optimizer on one flat tensor, which first sums several gradients into another."""
        weights = torch.from_numpy(self.weights.copy()).requires_grad_()
        gradients = [torch.from_numpy(gradient) for gradient in self.gradients]
        total = torch.empty_like(gradients[0])
        weights.grad = total if len(gradients) > 1 else gradients[0]
        optimizer: torch.optim.Optimizer = (
            torch.optim.Adam([weights], lr=LEARNING_RATE, betas=(MOMENTUM, BETA2), eps=EPSILON, fused=True)
            if self.kernel.planes == 2
            else torch.optim.SGD([weights], lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
        )

        def run(times: int) -> None:
            for _ in range(times):
                if len(gradients) > 1:
                    torch.add(gradients[0], gradients[1], out=total)
                    for gradient in gradients[2:]:
                        total.add_(gradient)
                optimizer.step()

        run(1)
        self.outputs["torch-fused"] = weights.detach().numpy().copy(), aligned(0, self.size)
        return run

    def checked_sides(self) -> dict[str, Side]:
        """Return all sides by name, after one checked run of each."""
        sides = {
            "fold": self.fold("fold", streaming=False),
            "fold-streaming": self.fold("fold-streaming", streaming=True),
            "fold-bfloat16": self.fold("fold-bfloat16", streaming=False, shown_type=fold.BFLOAT16),
            "fold-streaming-bfloat16": self.fold("fold-streaming-bfloat16", streaming=True, shown_type=fold.BFLOAT16),
            "fold-streaming-float16": self.fold("fold-streaming-float16", streaming=True, shown_type=fold.FLOAT16),
            "limit": self.loop("limit", streaming=False),
            "limit-streaming": self.loop("limit-streaming", streaming=True),
            "torch-fused": self.torch_fused(),
        }
        for side in sides.values():
            side(1)
        self.check()
        return sides

    def check(self) -> None:
        """Check that all sides computed the fold's weights, up to contracted products."""
        for name, (weights, _) in self.outputs.items():
            difference = float(np.abs(weights - self.outputs["fold"][0]).max())
            check(difference < 1e-4, f"{name}'s weights to be the fold's", f"a difference of {difference:g}")
        moved = float(np.abs(self.outputs["fold"][0] - self.weights).max())
        check(moved > 1e-3, "weights that moved", f"{moved:g}")


def measure(options: BenchOptions) -> list[Row]:
    """Return a row for each kernel, size and backend."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [row for kernel in KERNELS for size in options.parameters for row in _case_rows(kernel, size, options)]
    finally:
        torch.set_num_threads(threads)


def _case_rows(kernel: Kernel, size: int, options: BenchOptions) -> list[Row]:
    case = Case(kernel, size)
    sides = case.checked_sides()
    spreads = interleaved({name: repeated(side, options.repeat_s) for name, side in sides.items()}, options.repeats)
    roofline_s = min(spreads["limit"].median, spreads["limit-streaming"].median)
    return [
        {
            "bench": "kernels",
            "name": kernel.name,
            "size": size,
            "backend": backend,
            **spread.row(),
            "bytes_per_s": (4 * kernel.floats_moved + 2 * backend.endswith("float16")) * case.size / spread.median,
            "limit_share": roofline_s / spread.median,
            "checked": True,
        }
        for backend, spread in spreads.items()
    ]
