"""What a script writes to `optimizer.state` takes effect as in torch, or is refused by name."""

import collections
import copy
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from fastps.errors import ParameterChangedError, UnsupportedError, UsageError
from tests.support import processes
from tests.support.torch_optimizers import mean_square, one_worker, steps_on, with_and_without

Reset = Callable[[Any, torch.nn.Module], None]
MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def _zero_all(optimizer: Any, model: torch.nn.Module) -> None:
    for entry in optimizer.state.values():
        for name, value in entry.items():
            if name != "step":
                value.zero_()


def _dead_neuron(optimizer: Any, model: Any) -> None:
    for name, value in optimizer.state[model.weight].items():
        if name != "step":
            value.data[0] = 0


def _replaced_tensor(optimizer: Any, model: Any) -> None:
    entry = optimizer.state[model.weight]
    name = next(each for each in entry if each != "step")
    entry[name] = torch.full_like(entry[name], 0.25)


def _train(optimizer: Any, model: torch.nn.Module, target: float) -> None:
    for factor in range(1, 5):
        steps_on(model, optimizer, torch.full((2, 3), float(factor)), loss=lambda output: mean_square(output - target))


def _weights(make: str, reset: Reset, wrap: Callable[[torch.optim.Optimizer], Any]) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = wrap(MAKERS[make](model.parameters()))
    _train(optimizer, model, 5.0)
    reset(optimizer, model)
    _train(optimizer, model, -5.0)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


EMPTY: Any = collections.defaultdict(dict)
WRITES: dict[str, Reset] = {"zero all": _zero_all, "dead neuron": _dead_neuron, "replaced tensor": _replaced_tensor}
RESETS: dict[str, Reset] = {
    "new dict": lambda optimizer, model: setattr(optimizer, "state", EMPTY.copy()),
    "clear": lambda optimizer, model: optimizer.state.clear(),
    "set state": lambda it, model: it.__setstate__({"state": EMPTY.copy(), "param_groups": it.param_groups}),
    "drop one": lambda optimizer, model: operator.delitem(optimizer.state, next(model.parameters())),
    "of inner": lambda optimizer, model: setattr(getattr(optimizer, "_inner", optimizer), "state", EMPTY.copy()),
    **WRITES,
}
# torch's Adagrad has no state to begin anew with: it makes its state when it is constructed.
CASES = [(make, reset) for make in MAKERS for reset in RESETS if make != "adagrad" or reset in WRITES]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("make", "name"), CASES)
def test_state_that_a_script_writes_is_the_jobs_at_the_next_step(make: str, name: str) -> None:
    found, plain = with_and_without(lambda wrap: _weights(make, RESETS[name], wrap))
    without = _weights(make, lambda optimizer, model: None, lambda inner: inner)
    assert torch.allclose(found, plain, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(found, without, rtol=1e-3)


def test_state_is_read_on_demand_and_what_was_read_stays() -> None:
    with one_worker(torch.nn.Linear(3, 2), MAKERS["momentum"]) as (model, optimizer):
        assert len(optimizer.state) == 0
        assert optimizer.state[model.weight] == {}
        _train(optimizer, model, 1.0)
        entry = optimizer.state[model.weight]["momentum_buffer"]
        first = entry.clone()
        assert torch.equal(copy.deepcopy(dict(optimizer.state)[model.weight])["momentum_buffer"], first)
        _train(optimizer, model, -1.0)
        assert torch.equal(entry, first)
        assert not torch.equal(optimizer.state[model.weight]["momentum_buffer"], first)
        assert set(dict(optimizer.state)) == set(model.parameters())
        assert len(pickle.loads(pickle.dumps(list(optimizer.state.values())))) == 2
    assert optimizer.state[model.weight]["momentum_buffer"].shape == (2, 3)


def test_write_to_a_tensor_that_was_read_before_the_last_step_is_refused() -> None:
    with one_worker(torch.nn.Linear(3, 2), MAKERS["adam"]) as (model, optimizer):
        _train(optimizer, model, 1.0)
        kept = optimizer.state[model.weight]["exp_avg"]
        _train(optimizer, model, 1.0)
        kept.zero_()
        sentence = r"'exp_avg' that was read before the last step\(\) was written to.*read optimizer.state"
        with pytest.raises(UsageError, match=sentence):
            _train(optimizer, model, 1.0)


def test_an_entry_that_was_read_before_the_last_step_may_be_kept_but_not_written_to() -> None:
    with one_worker(torch.nn.Linear(3, 2), MAKERS["adam"]) as (model, optimizer):
        _train(optimizer, model, 1.0)
        kept = optimizer.state[model.weight]
        _train(optimizer, model, 1.0)
        assert kept["step"] == 4 and optimizer.state[model.weight]["step"] == 8
        torch.save(optimizer.state_dict(), file := io.BytesIO())
        torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        kept["mine"] = 7
        with pytest.raises(UsageError, match=r"an entry that was read before the last step\(\) was changed.*read opt"):
            _train(optimizer, model, 1.0)


def test_a_momentum_of_none_is_that_of_a_first_step_as_in_torch() -> None:
    def reset(optimizer: Any, model: Any) -> None:
        for entry in optimizer.state.values():
            entry["momentum_buffer"] = None

    found, plain = with_and_without(lambda wrap: _weights("momentum", reset, wrap))
    assert torch.allclose(found, plain, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("write", "error", "sentence"), [
    (lambda entry: entry.update(exp_avg=torch.zeros(5)), ValueError, "expected 'exp_avg' of shape"),
    *(
        (lambda entry, step=step: entry["step"].fill_(step), ValueError, "expected a whole number in 'step', 0 or more")
        for step in (-1.0, 2.5, float("nan"), float("inf"))
    ),
])  # fmt: skip
def test_values_that_cannot_be_the_jobs_are_refused(write: Any, error: type[Exception], sentence: str) -> None:
    with one_worker(torch.nn.Linear(3, 2), MAKERS["adam"]) as (model, optimizer):
        _train(optimizer, model, 1.0)
        before = model.weight.detach().clone()
        write(optimizer.state[model.weight])
        with pytest.raises(error, match=sentence):
            _train(optimizer, model, 1.0)
        assert torch.equal(model.weight, before)


@pytest.mark.parametrize("trained", [0, 1])
@pytest.mark.parametrize("change", [
    lambda model: model.double(), lambda model: setattr(model.weight, "data", torch.zeros(2, 4)),
])  # fmt: skip
def test_a_parameter_that_gets_another_type_or_form_after_wrapping_is_named(change: Any, trained: int) -> None:
    with one_worker(torch.nn.Linear(3, 2), MAKERS["momentum"]) as (model, optimizer):
        if trained:
            _train(optimizer, model, 1.0)
        optimizer.zero_grad()
        change(model)
        inputs = torch.ones(1, model.weight.shape[1], dtype=model.weight.dtype)
        with pytest.raises(ParameterChangedError, match=r"'(weight|bias)' was pointed at other memory .*unwrap"):
            model(inputs).sum().backward()
            optimizer.step()


OWN: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "momentum": (MAKERS["momentum"], {"step": -1, "master": 7}),
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), {"momentum_buffer": 3, "step": torch.ones(2)}),
    "adam": (MAKERS["adam"], {"master": 5, "max_exp_avg_sq": torch.zeros(1)}),
}


@pytest.mark.parametrize("name", list(OWN))
def test_names_that_the_rule_does_not_use_are_the_scripts_own(name: str) -> None:
    make, own = OWN[name]
    plain, model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    model.load_state_dict(plain.state_dict())
    expected, inner = make(plain.parameters()), make(model.parameters())
    steps_on(plain, expected, torch.ones(1, 3))
    steps_on(model, inner, torch.ones(1, 3))
    inner.state[model.weight].update(own)
    with fastps.DistributedOptimizer(inner) as optimizer:
        steps_on(model, optimizer, torch.ones(1, 3), 2)
        optimizer.load_state_dict(optimizer.state_dict())
        steps_on(model, optimizer, torch.ones(1, 3), 2)
        found = optimizer.state[model.weight]
        assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in own.items())
    steps_on(plain, expected, torch.ones(1, 3), 4)
    assert set(inner.state[model.weight]) == set(expected.state[plain.weight]) | set(own)
    assert torch.allclose(model.weight, plain.weight, rtol=1e-6)


def test_worker_0s_write_is_that_of_all_workers() -> None:
    def work(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1, bias=False)
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "bsp") as optimizer:
            for step in range(4):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                if step == 2:
                    optimizer.state.clear()
                optimizer.step()
            return [float(each) for each in optimizer.state[model.weight]["momentum_buffer"].flatten()]

    assert processes.results(processes.start_job(work, 2), 60) == [pytest.approx([1.9] * 3)] * 2


FROZEN: dict[str, Callable[[], torch.Tensor]] = {
    "uint8": lambda: torch.zeros(4, dtype=torch.uint8),
    "int64": lambda: torch.tensor(3),
    "bool": lambda: torch.ones(3, dtype=torch.bool),
    "complex64": lambda: torch.ones(2, dtype=torch.complex64),
    "float64": lambda: torch.ones(2, dtype=torch.float64),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "gaps": lambda: torch.ones(4, 4)[:, :2],
    "expanded": lambda: torch.ones(1).expand(8),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", list(FROZEN))
def test_frozen_parameters_of_other_kinds_are_left_out_as_in_torch(kind: str) -> None:
    def script(wrap: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        constant = torch.nn.Parameter(FROZEN[kind](), requires_grad=False)
        inner = torch.optim.AdamW([{"params": [constant, model.weight]}, {"params": [model.bias], "lr": 0.01}], lr=0.1)
        optimizer = wrap(inner)
        steps_on(model, optimizer, torch.ones(2, 3), 3)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert list(saved["state"]) == [1, 2]
        sums = [float(each["exp_avg"].sum()) for each in saved["state"].values()]
        return model.weight.tolist(), model.bias.tolist(), sums

    found, expected = with_and_without(script)
    assert found == expected


def test_gradient_of_a_parameter_that_was_left_out_is_refused_by_name() -> None:
    model = torch.nn.Linear(3, 1)
    late = torch.nn.Parameter(torch.ones(1, dtype=torch.float64), requires_grad=False)
    with fastps.DistributedOptimizer(torch.optim.SGD([*model.parameters(), late], lr=0.1)) as optimizer:
        late.requires_grad_(True)
        (model(torch.ones(1, 3)).sum() * late).sum().backward()
        sentence = "was frozen when the optimizer was wrapped, and was left out: expected a type of"
        with pytest.raises(UnsupportedError, match=sentence):
            optimizer.step()


def test_state_can_be_looked_at_after_a_failure_and_what_hands_it_out_says_that_it_was_not_kept() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = fastps.DistributedOptimizer(MAKERS["adam"](model.parameters()))
    _train(optimizer, model, 1.0)
    optimizer.close("the data ended")
    assert list(optimizer.state.values()) == list(optimizer._inner.state.values()) == []  # a trainer's clean-up moves them
    for call in (optimizer.state_dict, optimizer.unwrap):
        with pytest.raises(UsageError, match="the worker left with an error"):
            call()
