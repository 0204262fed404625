"""What FastpsStrategy refuses, in one sentence each, before a worker has started."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastps
from tests.clients import programs

programs.needs("lightning")

from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.accelerators import CUDAAccelerator  # noqa: E402
from lightning.pytorch.callbacks import StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.plugins.precision import FSDPPrecision  # noqa: E402

from fastps.integrations.lightning import FastpsStrategy, checks  # noqa: E402
from tests.integrations.lightning_modules import Line, loader, single, trainer  # noqa: E402


def _refused(error: type[Exception], *words: str, **options: Any) -> None:
    given = {"accelerator": "cpu", "devices": 2, "logger": False, "strategy": "fastps", **options}
    with pytest.raises(error) as found:
        Trainer(**given)
    text = str(found.value)
    assert all(word in text for word in words), text
    assert "\n" not in text


def test_names_are_registered_and_make_the_strategy() -> None:
    for name in ("fastps", "fastps_spawn", "fastps_fork", "fastps_notebook"):
        made = Trainer(accelerator="cpu", devices=2, strategy=name, logger=False).strategy
        assert isinstance(made, FastpsStrategy)
        assert made.launcher.is_interactive_compatible == (name in ("fastps_fork", "fastps_notebook"))


@pytest.mark.parametrize(("given", "words"), [
    ({"precision": "64-true"}, ("64-true", "float64", "bf16-mixed")),
    ({"plugins": [FSDPPrecision("bf16-mixed")]}, ("FSDPPrecision",)),
    ({"sync_batchnorm": True}, ("sync_batchnorm", "averages BatchNorm")),
    ({"num_nodes": 2}, ("num_nodes=2", "expected a launcher", "fastps run --nnodes 2")),
    ({"strategy": FastpsStrategy(on_worker_loss="continue")}, ("on_worker_loss='continue'", "ckpt_path")),
    ({"FASTPS_ON_WORKER_LOSS": "continue"}, ("on_worker_loss='continue'",)),
], ids=lambda given: next(iter(given)))  # fmt: skip
def test_what_the_strategy_cannot_do_is_refused_by_its_name(
    given: dict[str, Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`given`: options of the Trainer, or variables of the environment, whose names are upper case."""
    for name in filter(str.isupper, given):
        monkeypatch.setenv(name, given[name])
    _refused(fastps.UnsupportedError, *words, **{name: value for name, value in given.items() if not name.isupper()})


def test_accelerators_other_than_the_cpu_are_refused() -> None:
    with pytest.raises(fastps.UnsupportedError, match=r"accelerator='cpu'.*CUDAAccelerator.*docs/how-to/gpu.md"):
        checks.check_machine(CUDAAccelerator(), [torch.device("cuda", 0)])


@pytest.mark.parametrize("option", ["job", "rank", "workers", "model"])
def test_options_that_the_strategy_gives_are_refused(option: str) -> None:
    with pytest.raises(fastps.UsageError, match=rf"FastpsStrategy\({option}="):
        FastpsStrategy("bsp", **{option: 1})


def test_number_of_devices_other_than_the_launchers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_RANK", "1")
    monkeypatch.setenv("FASTPS_WORKERS", "4")
    monkeypatch.setenv("FASTPS_JOB", "none")
    _refused(fastps.UsageError, "devices=2", "devices=4", "leave devices out")
    made = Trainer(accelerator="cpu", devices=1, strategy="fastps", logger=False)
    assert (made.world_size, made.global_rank, made.is_global_zero) == (4, 1, False)


def test_stochastic_weight_averaging_with_batch_norm_is_refused() -> None:
    its = SimpleNamespace(callbacks=[StochasticWeightAveraging(0.1)])
    checks.check_callbacks(its, Line())
    with pytest.raises(fastps.UnsupportedError, match=r"StochasticWeightAveraging with BatchNorm.*WeightAveraging"):
        checks.check_callbacks(its, torch.nn.Sequential(torch.nn.BatchNorm1d(2)))


class _Lbfgs(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class _Wrapped(Line):
    def configure_optimizers(self) -> Any:
        return fastps.DistributedOptimizer(torch.optim.SGD(self.parameters(), lr=0.1))


@pytest.mark.parametrize(("module", "sync", "words"), [
    (_Lbfgs, "bsp,clip=1", "LBFGS"), (_Wrapped, "bsp", "expected the torch optimizer, because FastpsStrategy wraps it"),
])  # fmt: skip
def test_optimizers_that_cannot_be_wrapped_are_refused(module: Any, sync: str, words: str, tmp_path: Path) -> None:
    with pytest.raises((fastps.UnsupportedError, fastps.UsageError), match=words):
        trainer(tmp_path, FastpsStrategy(sync), workers=1).fit(module(), loader(8))


def test_one_workers_lbfgs_is_as_without_fastps(tmp_path: Path) -> None:
    both = _Lbfgs(), _Lbfgs()
    trainer(tmp_path, FastpsStrategy("bsp"), workers=1).fit(both[0], loader(8))
    single(tmp_path).fit(both[1], loader(8))
    assert [each.tolist() for each in both[0].parameters()] == [each.tolist() for each in both[1].parameters()]


def test_process_group_of_another_size_is_refused(tmp_path: Path) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        from fastps.integrations import process_group

        with pytest.raises(fastps.UsageError, match="worker 0 of 1: expected 1 of 4"):
            process_group.begin(1, 4)
    finally:
        torch.distributed.destroy_process_group()
