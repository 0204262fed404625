"""DistributedDataParallel with push_hook: the store sums, DDP averages nothing, and what would train wrongly is refused."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fastps
from tests.collectives.test_process_group import _group
from tests.support import processes
from tests.support.torch_optimizers import alone as alone


def _model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))


def _batches() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(12, 8, 4)


def _in_workers(folder: Path, work: Callable[[int], Any], backend: str) -> list[Any]:
    def live(rank: int) -> Any:
        with _group(folder, rank, 2, backend):
            return work(rank)

    return processes.results(processes.start_job(live, 2), 60)


def _train_on(model: torch.nn.Module, optimizer: Any, batches: Iterable[torch.Tensor]) -> None:
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch), batch[:, :2]).backward()
        optimizer.step()


def _train(rank: int, sync: str, as_views: bool) -> list[Any]:
    ddp = DistributedDataParallel(_model(), gradient_as_bucket_view=as_views, bucket_cap_mb=0.0001)
    ddp.register_comm_hook(None, fastps.push_hook)
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), sync=sync)
    _train_on(ddp, optimizer, [batch.chunk(2)[rank] for batch in _batches()])
    optimizer.wait_for_others()
    found = [optimizer.version, [parameter.detach().clone().numpy() for parameter in ddp.parameters()]]
    optimizer.close()
    return found


def _register(rank: int) -> int:
    DistributedDataParallel(_model()).register_comm_hook(None, fastps.push_hook)
    return rank


def test_torch_takes_the_hook_with_its_annotations(tmp_path: Path) -> None:
    assert _in_workers(tmp_path, _register, "gloo") == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fastps", "gloo"])
@pytest.mark.parametrize("as_views", [False, True])
def test_ddp_that_pushes_trains_as_one_process(tmp_path: Path, backend: str, as_views: bool) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    _train_on(model, optimizer, _batches())
    for versions, weights in _in_workers(tmp_path, lambda rank: _train(rank, "bsp", as_views), backend):
        assert versions == len(_batches())
        for found, wanted in zip(weights, model.parameters(), strict=True):
            torch.testing.assert_close(torch.from_numpy(found), wanted.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_ddp_that_pushes_trains_without_waiting_under_asp(tmp_path: Path) -> None:
    found = _in_workers(tmp_path, lambda rank: _train(rank, "asp", False), "fastps")
    assert [versions for versions, _ in found] == [2 * len(_batches())] * 2
    assert all((first == second).all() for first, second in zip(found[0][1], found[1][1], strict=True))


@pytest.mark.slow
def test_what_a_push_would_not_carry_is_refused(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        found = []
        for model, chosen in (
            (_model(), lambda ddp: list(ddp.parameters())[:2]),
            (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), lambda ddp: list(ddp.parameters())),
        ):
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(None, fastps.push_hook)
            with pytest.raises(fastps.UnsupportedError) as caught:
                fastps.DistributedOptimizer(torch.optim.SGD(chosen(ddp), lr=0.1))
            found.append(str(caught.value))
        return found

    for partial, buffers in _in_workers(tmp_path, work, "fastps"):
        assert "parameter 'module.2.weight' of the DistributedDataParallel model is not in the optimizer" in partial
        assert "broadcast_buffers=False" in buffers
