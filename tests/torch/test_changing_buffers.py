"""Buffers that a module assigns, registers or resizes while it trains, and buffers of types that have no plain average."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.errors import CheckpointError
from tests.support import processes
from tests.support.torch_optimizers import one_worker, steps_on


class Statistics(torch.nn.Module):
    """Keeps a mean in a way of its own, and counts its calls."""

    def __init__(self, keep: Callable[["Statistics", torch.Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self._keep = keep

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._keep(self, inputs.detach().mean(0))
        self.count += 1
        return inputs


def _averaged(keep: Callable[[Any, torch.Tensor], None]) -> list[dict[str, Any]]:
    """What two workers, with means of 1 and 3, have after a step and average_buffers()."""

    def work(rank: int) -> dict[str, Any]:
        model = torch.nn.Sequential(Statistics(keep), torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        with fastps.DistributedOptimizer(inner, model=model, timeout_s=30) as optimizer:
            steps_on(model, optimizer, torch.full((4, 2), 1.0 + 2 * rank))
            optimizer.average_buffers()
            return {name: buffer.flatten()[:2].tolist() for name, buffer in model.named_buffers()}

    return processes.results(processes.start_job(work, 2), 60)


def _keep_far_from_zero(module: Any, mean: torch.Tensor) -> None:
    """The means are 3001 and 3003, and in single precision their squares differ by more than the variance."""
    module.register_buffer("running_mean", 3000 + mean)
    module.register_buffer("running_var", torch.full((2,), 0.1))


FAR_FROM_ZERO = {"0.running_mean": [3002.0, 3002.0], "0.running_var": pytest.approx([1.1, 1.1], rel=1e-6)}
OWN_MEANS = [{"0.mean": [mean, mean], "0.count": [1]} for mean in (1.0, 3.0)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("keep", "expected"), [
    (lambda it, mean: setattr(it, "mean", 0.5 * mean), [{"0.mean": [1.0, 1.0], "0.count": [1]}] * 2),
    (lambda it, mean: it.register_buffer("late", 2 * mean), [{"0.mean": [0.0], "0.count": [1], "0.late": [4.0, 4.0]}] * 2),
    (lambda it, mean: it.mean.resize_(mean.shape).copy_(mean), [{"0.mean": [2.0, 2.0], "0.count": [1]}] * 2),
    (lambda it, mean: setattr(it, "mean", mean.repeat(1 << 18)), OWN_MEANS),
    (lambda it, mean: setattr(it, "mean", mean.repeat(1 + fastps.rank())), OWN_MEANS),
    (lambda it, mean: setattr(it, "mean", mean[:1].expand(4)), OWN_MEANS),
    (_keep_far_from_zero, [{"0.mean": [0.0], "0.count": [1], **FAR_FROM_ZERO}] * 2),
], ids=["assigns", "registers", "resizes", "grows much", "differs", "not writable", "variances far from zero"])  # fmt: skip
def test_buffers_are_averaged_as_the_model_has_them_now(keep: Any, expected: list[dict[str, Any]]) -> None:
    assert _averaged(keep) == expected


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "complex64": lambda: torch.polar(torch.ones(4), torch.arange(4.0)),
    "bool": lambda: torch.ones(4, 4, dtype=torch.bool).tril(),
    "bfloat16": lambda: torch.full((4,), 0.1, dtype=torch.bfloat16),
    "float8": lambda: torch.full((4,), 0.5).to(torch.float8_e4m3fn),
    "int16": lambda: torch.arange(4, dtype=torch.int16),
    "scalar": lambda: torch.tensor(0.25),
    "empty": lambda: torch.empty(0),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


class Constant(torch.nn.Module):
    """A layer with a constant."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(inputs)
        return found


def _train(model: torch.nn.Module, folder: Path, resume: Path | None = None) -> Any:
    """Train for four steps; returns the job's checkpointing."""
    with one_worker(model, named=True, checkpoint=folder, every=2, resume=resume) as (_, optimizer):
        steps_on(model, optimizer, torch.ones(1, 2), 4)
        optimizer.average_buffers()
        return optimizer._job.checkpointing


def _bytes(tensor: torch.Tensor) -> list[Any]:
    found: list[Any] = tensor.to_dense().to(torch.complex128).tolist()
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", list(KINDS))
def test_constants_of_every_type_pass_averages_checkpoints_and_a_resume(kind: str, tmp_path: Path) -> None:
    model = Constant(KINDS[kind]())
    checkpointing = _train(model, tmp_path)
    assert (checkpointing.failures, checkpointing.written) == (0, 2)
    assert _bytes(model.value) == _bytes(KINDS[kind]())
    other = Constant(torch.zeros_like(KINDS[kind]()))
    _train(other, tmp_path / "again", tmp_path)
    if kind != "sparse":  # a checkpoint cannot hold it
        assert _bytes(other.value) == _bytes(KINDS[kind]())


@pytest.mark.slow
def test_buffers_that_are_not_persistent_may_have_another_length_at_a_resume(tmp_path: Path) -> None:
    model = Constant(torch.ones(2))
    model.register_buffer("mask", torch.ones(3), persistent=False)
    _train(model, tmp_path)
    other = Constant(torch.zeros(2))
    other.register_buffer("mask", torch.ones(5), persistent=False)
    _train(other, tmp_path / "again", tmp_path)
    assert other.mask.shape == (5,)
    with pytest.raises(CheckpointError, match="size mismatch"):
        _train(Constant(torch.zeros(3)), tmp_path / "third", tmp_path)


class Observer(torch.nn.Module):
    """Takes the length of a loaded buffer, as torch's observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("most", torch.empty(0))
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.most = inputs.detach().amax(0)
        found: torch.Tensor = self.layer(inputs)
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        self.most.resize_(state_dict[prefix + "most"].shape)
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_observer_takes_the_length_that_was_saved(tmp_path: Path) -> None:
    _train(Observer(), tmp_path)
    with one_worker(Observer(), named=True, resume=tmp_path) as (other, _):
        assert other.most.tolist() == [1.0, 1.0]


def test_checkpoint_that_cannot_be_written_is_counted_whatever_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> Path:
        raise KeyError("a fault")

    monkeypatch.setattr("fastps.checkpoint.periodic.write", fail)
    checkpointing = _train(Constant(torch.ones(2)), tmp_path)
    assert checkpointing.failures >= 1
    assert checkpointing.written == 0
