"""Single kernels under pytest-benchmark, which saves its figures and compares them with those of another build:

    pytest -p pytest_benchmark.plugin tests/kernels/update/benchmark_kernels.py --benchmark-autosave
    pytest -p pytest_benchmark.plugin tests/kernels/update/benchmark_kernels.py --benchmark-compare

The cases are those of `fastps bench kernels`, which lets sides take turns: between sides its ratios are the better ones.
"""

from typing import Any

import pytest
import torch

from fastps.bench.kernels import KERNELS, Case, Kernel

SIDES = ("fold", "fold-streaming", "limit", "limit-streaming", "torch-fused")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("size", [1_000, 25_000, 1_000_000])
@pytest.mark.parametrize("kernel", KERNELS, ids=[kernel.name for kernel in KERNELS])
def test_kernel(benchmark: Any, kernel: Kernel, size: int, side: str) -> None:
    benchmark.group = f"{kernel.name}, {size:,} parameters"
    benchmark(Case(kernel, size).checked_sides()[side], 1)
