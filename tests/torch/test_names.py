"""Parameters are known by name: found without `model=`, free of what wrappers put before them, and in one order everywhere."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support import processes
from tests.support.said import listen

SIDE = 4


class Wrapped(torch.nn.Module):
    """A module that puts "module." before each name, as DataParallel and many helpers do."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the module."""
        return self.module(batch)  # type: ignore[no-any-return]


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE), torch.nn.BatchNorm1d(SIDE), torch.nn.Linear(SIDE, SIDE))


def _checkpointed() -> torch.nn.Module:
    model = _model()
    inner = Wrapped(model[0])
    inner._checkpoint_wrapped_module = inner._modules.pop("module")  # as torch's activation checkpointing names it
    model[0] = inner
    return model


WRAPPERS: dict[str, Callable[[], torch.nn.Module]] = {
    "plain": _model,
    "compiled": lambda: torch.compile(_model(), backend="eager"),  # type: ignore[return-value]
    "module": lambda: Wrapped(_model()),
    "both": lambda: torch.compile(Wrapped(_model()), backend="eager"),  # type: ignore[return-value]
    "checkpointed": _checkpointed,
}


def _names(optimizer: fastps.DistributedOptimizer) -> list[str]:
    return [each.name for each in optimizer.worker.store.parameters]


def _sgd(parameters: Any, **options: Any) -> fastps.DistributedOptimizer:
    options.setdefault("timeout_s", 30)
    return fastps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1, momentum=0.9), **options)


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("kind", WRAPPERS)
def test_names_are_those_of_the_model_without_its_wrappers(kind: str, with_model: bool) -> None:
    model = WRAPPERS[kind]()
    with _sgd(model.parameters(), **({"model": model} if with_model else {})) as optimizer:
        assert _names(optimizer) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]


def test_named_parameters_have_these_names_and_a_part_of_a_model_those_in_that_part() -> None:
    model = _model()
    with _sgd(list(Wrapped(model).named_parameters())[::-1]) as optimizer:
        assert _names(optimizer)[0] == "2.bias"
    with _sgd(model[2].parameters()) as optimizer:
        assert _names(optimizer) == ["weight", "bias"]
    parameters = [torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))]
    with _sgd(parameters) as optimizer:
        assert _names(optimizer) == ["param_groups[0][0]", "param_groups[0][1]"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("with_model", [True, False])
def test_a_scripted_model_has_its_names_and_prevents_no_other_wrap(with_model: bool) -> None:
    scripted, other = torch.jit.script(_model()), _model()  # its _parameters is no dict
    with _sgd(scripted.parameters(), **({"model": scripted} if with_model else {})) as optimizer:
        assert _names(optimizer)[:2] == ["0.weight", "0.bias"]
    with _sgd(other.parameters()) as optimizer:
        assert _names(optimizer)[:2] == ["0.weight", "0.bias"]


def test_a_model_inside_another_and_its_deep_copy_change_no_name() -> None:
    model = _model()
    holders = [Wrapped(model), torch.optim.swa_utils.AveragedModel(model), torch.nn.ModuleDict({"net": model})]
    with _sgd(model.parameters()) as optimizer:
        assert _names(optimizer)[0] == "0.weight"
    assert holders


def test_checkpoints_readers_and_replaced_weights_fit_a_model_however_it_is_wrapped(tmp_path: Path) -> None:
    before = None
    for place, (kind, make) in enumerate(list(WRAPPERS.items())[:4]):
        model, shown = make(), _model()
        job = f"names-{kind}"
        with _sgd(model.parameters(), model=model, job=job, resume=tmp_path if place else None) as optimizer:
            for one, other in zip(model.state_dict().values(), before or (), strict=bool(before)):
                assert torch.equal(one, other), kind
            model(torch.randn(SIDE, SIDE)).square().mean().backward()
            optimizer.step()
            with fastps.reader(job) as reader:
                reader.update(shown)
                assert all(torch.equal(*pair) for pair in zip(shown.parameters(), model.parameters(), strict=True))
            optimizer.replace_weights({name: value + 1 for name, value in _state(model).items()})
            fastps.save(optimizer, tmp_path)
            before = [value.clone() for value in model.state_dict().values()]


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the model inside the wrappers."""
    inner = next(each for each in model.modules() if isinstance(each, torch.nn.Sequential))
    return {name: value.clone() for name, value in inner.state_dict().items()}


def _outcomes(work: Callable[[int], Any]) -> list[Any]:
    children = processes.start_job(work, 2)
    processes.finish(children, 60.0)
    return [child.outcome for child in children]


def _reversed(make: Callable[[int], list[Any]], **options: Any) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        parameters = make(rank)
        with _sgd(parameters[::-1] if rank else parameters, **options) as optimizer:
            optimizer.wait_for_start()
            sum((each * (index + 1)).sum() for index, each in enumerate(parameters)).backward()
            optimizer.step()
            return [each.detach().numpy().copy() for each in parameters]

    return work


def _alike(rank: int) -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(SIDE)) for _ in range(3)]


def _layers(rank: int) -> list[Any]:
    torch.manual_seed(rank)
    _layers.kept = model = torch.nn.Sequential(*[torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(3)])  # type: ignore[attr-defined]
    return list(model.parameters())


@pytest.mark.slow
def test_another_order_of_layers_is_refused_by_their_names_whatever_the_seed() -> None:
    outcomes = _outcomes(_reversed(_layers, timeout_s=3))  # so long worker 0 waits
    assert outcomes[1][0] == "LayoutError" and "parameter 0 is '2.weight' here and '0.weight' there" in outcomes[1][1]
    assert "in one order" in outcomes[1][1]


@pytest.mark.slow
def test_another_order_of_parameters_without_names_is_refused_by_their_values() -> None:
    outcomes = _outcomes(_reversed(_alike, timeout_s=3))
    assert outcomes[1][0] == "LayoutError" and "param_groups[0][0] is worker 0's param_groups[0][2]" in outcomes[1][1]


def test_equal_values_in_one_order_are_no_other_order() -> None:
    def work(rank: int) -> Any:
        parameters = [torch.nn.Parameter(torch.zeros(SIDE)) for _ in range(3)]
        with _sgd(parameters) as optimizer:
            optimizer.wait_for_start()
            sum((each * (index + 1)).sum() for index, each in enumerate(parameters)).backward()
            optimizer.step()
            return [each[0].item() for each in parameters]

    for outcome in _outcomes(work):
        assert np.allclose(outcome, [-0.1, -0.2, -0.3])


def test_a_worker_whose_first_weights_are_others_than_worker_0s_says_so_once() -> None:
    def work(seed: int) -> Callable[[int], list[str]]:
        def of(rank: int) -> list[str]:
            found = listen()
            torch.manual_seed(seed * rank)
            model = torch.nn.Linear(SIDE, 1)
            with _sgd(model.parameters()) as optimizer:
                for _ in range(2):
                    model(torch.ones(1, SIDE)).sum().backward()
                    optimizer.step()
            return [each for each in found if "first weights" in each]

        return of

    assert _outcomes(work(0)) == [[], []]
    zero, one = _outcomes(work(1))
    assert zero == [] and len(one) == 1 and "('weight' and 1 more)" in one[0] and "copy after wrapping" in one[0]


@pytest.mark.parametrize("kind", ["unnamed", "named", "jobs", "one after the other"])
def test_two_open_jobs_that_only_their_order_tells_apart_are_refused(kind: str) -> None:
    def work(rank: int) -> str:
        os.environ.update({"FASTPS_RANK": str(rank), "FASTPS_WORKERS": "2", "FASTPS_JOB": f"apart-{os.getppid()}"})
        parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
        optimizers: list[fastps.DistributedOptimizer] = []
        try:
            for index, each in enumerate(parameters):
                if kind == "one after the other" and optimizers:
                    optimizers[0].unwrap()
                options = {"job": f"of-{index}-{os.getppid()}", "rank": rank, "workers": 2} if kind == "jobs" else {}
                optimizers.append(_sgd([(f"of {index}", each)] if kind == "named" else [each], **options))
                (each * (index + 1)).sum().backward()
                optimizers[-1].step()
        except fastps.UsageError as error:
            for optimizer in optimizers:
                optimizer.close()
            return str(error)
        return str([round(each[0].item(), 6) for each in parameters])

    for said in _outcomes(work):
        assert ("neither has names" in said) if kind == "unnamed" else (said == "[-0.1, -0.2]"), said
