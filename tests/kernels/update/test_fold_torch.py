"""The compiled fold, bit for bit, beside torch.optim itself."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from fastps.kernels.update import fold as compiled
from fastps.kernels.update.fold import FLOAT32, FLOAT64, FOLD_SUM, RULE_SGD
from tests.support.folds.fold_jobs import ROOT_ROWS, ROWS, Pushes, Row, bits
from tests.support.torch_optimizers import alone  # noqa: F401 - a fixture


class ExactSquareRoot(TorchFunctionMode):
    """Within it, torch's square root is the correctly rounded one of IEEE 754."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.sqrt:
            return torch.from_numpy(np.sqrt(args[0].numpy()))
        if func is torch.Tensor.sqrt_:
            return args[0].copy_(torch.from_numpy(np.sqrt(args[0].numpy())))
        return func(*args, **(kwargs or {}))


PLAINLY = contextlib.nullcontext()


needs_fused_torch = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="without these instruction sets torch itself does not fuse its multiply-adds",
)


def steps_beside_torch(
    row: Row, n: int, context: contextlib.AbstractContextManager[Any] = PLAINLY, gradient_type: int = FLOAT32
) -> Iterator[tuple[str, Any, Any]]:
    """200 steps on one parameter of n numbers; after each, for each instruction set: its name, our weights and torch's."""
    random, dtype = np.random.default_rng(n), np.float64 if gradient_type == FLOAT64 else np.float32
    start = random.standard_normal(n, dtype)
    ours = {isa: (start, np.zeros((row.state_planes, n), dtype), np.zeros(1, np.int64)) for isa in compiled.instruction_sets()}
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = row.optimizer([parameter], foreach=False, **row.options)
    for _ in range(200):
        gradient = random.standard_normal(n, dtype)
        parameter.grad = torch.from_numpy(gradient)
        with context:
            optimizer.step()
        pushes: Pushes = [(gradient, [row.hyper], [True], 1.0, 1.0)]
        for isa, before in ours.items():
            options = {"instruction_set": isa, "gradient_type": gradient_type}
            ours[isa] = compiled.fold(row.rule, FOLD_SUM, [(0, n, 0)], pushes, *before, **options)
            yield isa, ours[isa][0], parameter.detach().numpy()


@pytest.mark.sampled(16)
@needs_fused_torch
@ROWS
def test_200_steps_give_the_bits_of_torch(row: Row) -> None:
    """Where there is a square root, but for torch's, a vector library's, which does not always round correctly."""
    for n in (1, 7, 17, 1023, 3001):
        context = PLAINLY if row.rule == RULE_SGD else ExactSquareRoot()
        for step, (isa, ours, theirs) in enumerate(steps_beside_torch(row, n, context)):
            assert np.array_equal(bits(ours), bits(theirs)), (isa, n, step)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("row", ROOT_ROWS, ids=lambda row: row.name)
def test_square_roots_stay_beside_torch_with_the_square_root_of_this_machine(row: Row) -> None:
    for _, ours, theirs in steps_beside_torch(row, 3001, PLAINLY):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)
