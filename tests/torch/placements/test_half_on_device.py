"""Models in half precision with their shards on devices: the kernel writes the halves, with the bits of the CPU's fold."""

from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.support.torch_optimizers import OPTIMIZERS, batches_of, new_model, one_worker
from tests.torch.placements.test_staged import HostDeviceOptimizer, SeveralDevicesOptimizer, assert_same
from tests.torch.test_half_parameters import Mixed, _half, _train

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
ADAM = OPTIMIZERS["adam"]


def made(name: str, dtype: torch.dtype) -> torch.nn.Module:
    return Mixed(dtype) if name == "mixed" else _half(dtype)


def bits(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.detach().float().flatten().tolist() for parameter in model.parameters()]


def state_of(optimizer: fastps.DistributedOptimizer) -> list[Any]:
    entries = optimizer.state_dict()["state"].values()
    return [(name, value.tolist()) for entry in entries for name, value in sorted(entry.items())]


@pytest.mark.sampled(2)
@DTYPES
@pytest.mark.parametrize("name", ["half", "mixed"])
def test_one_worker_has_the_bits_of_the_cpu_in_halves_masters_and_state(name: str, dtype: torch.dtype) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> list[Any]:
        _train(model, optimizer, batches_of(12, 8))
        assert {parameter.dtype for parameter in model.parameters()} >= {dtype}
        state = state_of(optimizer)
        assert any(entry == "master" for entry, _ in state)
        return state

    assert_same(HostDeviceOptimizer, run, ADAM, lambda: made(name, dtype), sync="bsp")


@pytest.mark.sampled(2)
@DTYPES
def test_a_state_with_masters_is_loaded_and_the_run_goes_on_from_it(dtype: torch.dtype) -> None:
    found = []
    for kind in (fastps.DistributedOptimizer, HostDeviceOptimizer):
        with one_worker(made("mixed", dtype), ADAM, named=True, kind=kind) as (model, optimizer):
            _train(model, optimizer, batches_of(5, 8))
            state, weights = optimizer.state_dict(), {key: value.clone() for key, value in model.state_dict().items()}
        again = made("mixed", dtype)
        again.load_state_dict(weights)
        with kind(ADAM(again.parameters()), sync="bsp", model=again) as optimizer:
            optimizer.load_state_dict(state)
            _train(again, optimizer, batches_of(4, 8))
            found.append((bits(again), state_of(optimizer)))
    assert found[0] == found[1]


def run_ranks(kind: type[fastps.DistributedOptimizer], name: str) -> list[Any]:
    """Train with 3 workers, each on its share of the batches; returns the model's bits at each."""

    def work(rank: int) -> Any:
        with one_worker(made(name, torch.bfloat16), ADAM, named=True, kind=kind) as (model, optimizer):
            optimizer.wait_for_start()
            _train(model, optimizer, batches_of(9, 24)[rank::3] + batches_of(6, 8))
            optimizer.wait_for_others()
            return bits(model)

    return processes.results(processes.start_job(work, 3), 60)


@pytest.mark.parametrize("name", [pytest.param("half", marks=pytest.mark.slow), "mixed"])
def test_workers_on_two_devices_pull_halves_and_have_the_bits_of_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run_ranks(fastps.DistributedOptimizer, name)
    monkeypatch.setenv("FASTPS_GPUS", "0,1")
    found = run_ranks(SeveralDevicesOptimizer, name)
    assert found[0] == found[1] == found[2] == expected[0]
    assert expected[0] != bits(new_model().to(torch.bfloat16))
