"""What an optimizer takes over when it is wrapped, and what of the wrapped one it refuses; who ends before others begin."""

import contextlib
import copy
import mmap
import multiprocessing
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import fastps
from fastps.kernels.protocol.lane import Lane
from fastps.store import jobs_of_process
from tests.support import processes
from tests.support.torch_optimizers import OPTIMIZERS, mean_square, one_worker, steps_on, with_and_without


def _fresh(name: str = "momentum") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    return model, OPTIMIZERS[name](model.parameters())


def _train(model: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        steps_on(model, optimizer, inputs, loss=mean_square)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad", "rmsprop"])
@pytest.mark.parametrize("sync", ["bsp", "asp,shards=2"])
def test_the_state_of_an_optimizer_goes_on_when_it_is_wrapped(name: str, sync: str) -> None:
    plain, optimizer = _fresh(name)
    _train(plain, optimizer, range(10))
    checkpoint = copy.deepcopy((plain.state_dict(), optimizer.state_dict()))
    _train(plain, optimizer, range(10, 20))

    model, inner = _fresh(name)
    model.load_state_dict(checkpoint[0])
    inner.load_state_dict(checkpoint[1])
    with fastps.DistributedOptimizer(inner, sync=sync) as wrapped:
        if name != "momentum":  # torch's SGD counts no steps
            assert wrapped.state_dict()["state"][0]["step"] == 10
        _train(model, wrapped, range(10, 20))
        for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["adam", "adamw-amsgrad", "nadam", "radam", "adamax", "momentum", "sgd", "rmsprop-all"])
def test_the_torch_optimizer_of_halves_steps_by_itself_after_the_job(name: str, dtype: torch.dtype) -> None:
    model = torch.nn.Linear(3, 2, dtype=dtype)
    optimizer = fastps.DistributedOptimizer(OPTIMIZERS[name](model.parameters()))
    steps_on(model, optimizer, torch.ones(1, 3, dtype=dtype), 3)
    plain, saved = copy.deepcopy(model), optimizer.state_dict()
    inner, expected = optimizer.unwrap(), OPTIMIZERS[name](plain.parameters())
    assert torch.equal(inner.state[model.weight]["master"], saved["state"][0]["master"])
    expected.load_state_dict({**saved, "state": saved["state"] if len(saved["state"][0]) > 1 else {}})
    for each, of in ((inner, model), (expected, plain)):
        steps_on(of, each, torch.ones(1, 3, dtype=dtype), 3)
    assert torch.allclose(model.weight, plain.weight, rtol=0.02)  # torch rounds NAdam's product when it loads
    assert {each.dtype for each in inner.state[model.weight].values() if each.dim()} <= {dtype}
    fastps.DistributedOptimizer(inner).close()
    assert len(inner._optimizer_step_pre_hooks) == 1


def test_state_is_not_loaded_into_an_optimizer_while_it_is_wrapped() -> None:
    _, inner = _fresh("adam")
    with fastps.DistributedOptimizer(inner) as optimizer:
        optimizer.load_state_dict(inner.state_dict())
        with pytest.raises(fastps.UsageError, match="load before wrapping it"):
            inner.load_state_dict(inner.state_dict())
    inner.load_state_dict(inner.state_dict())


def test_a_group_that_is_added_to_the_wrapped_optimizer_is_refused_at_the_next_step() -> None:
    with one_worker(torch.nn.Linear(4, 3), OPTIMIZERS["momentum"]) as (model, optimizer):
        _train(model, optimizer, range(2))
        optimizer._inner.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": 0.01})
        with pytest.raises(fastps.UsageError, match=r"of 1 groups, .* found 2: add and remove groups"):
            _train(model, optimizer, range(1))


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
def test_a_parameter_in_place_of_an_equal_one_is_refused(shape: tuple[int, ...]) -> None:
    first, equal = torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(shape))
    with fastps.DistributedOptimizer(torch.optim.SGD([first], lr=0.0)) as optimizer:
        optimizer.step()
        optimizer.param_groups[0]["params"][0] = equal
        equal.sum().backward()
        with pytest.raises(fastps.UsageError, match=r"expected the 1 parameters .* found 1, or others in their place"):
            optimizer.step()


def test_a_group_may_keep_values_of_any_kind() -> None:
    model, inner = _fresh()
    inner.param_groups[0]["history"] = None
    with fastps.DistributedOptimizer(inner) as optimizer:
        for value in (np.arange(2), np.arange(3), None, torch.arange(2), None):
            _train(model, optimizer, range(1))
            optimizer.param_groups[0]["history"] = value
        _train(model, optimizer, range(1))
        assert optimizer.version == 6


@pytest.mark.parametrize(("slot", "group"), [(0, 1), (1, 0), (2**32 - 1, 0), (0, 2**32 - 1)])
@pytest.mark.sampled(2)
def test_hyper_parameters_are_written_into_slots_only(slot: int, group: int) -> None:
    with one_worker() as (_, optimizer):
        lane: Lane = optimizer.worker.lane
        with pytest.raises(IndexError, match=r"expected a (group|slot) of 0 to 0"):
            lane.set_hyper(slot, group, *optimizer.worker.store.hypers[0])


def test_what_is_no_optimizer_is_refused_by_an_example() -> None:
    model, _ = _fresh()
    with pytest.raises(fastps.UsageError, match=r"as in DistributedOptimizer\(torch.optim.SGD.*found generator"):
        fastps.DistributedOptimizer(model.parameters())  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [
    ("sync", 5), ("sync", ["asp"]), ("job", 3), ("batch_size", "32"), ("workers", 1.0), ("rank", "0"), ("seeds", 5),
    ("model", []),
])  # fmt: skip
def test_an_argument_of_another_kind_is_refused_by_name(name: str, value: Any) -> None:
    model, _ = _fresh()
    given = {name: value}
    with pytest.raises(fastps.UsageError, match=re.escape(f"expected {name}= to be ") + f".*found {re.escape(repr(value))}"):
        fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_a_model_that_is_another_ones_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model).close()
    assert not caplog.text
    fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=other).close()
    assert "model= has none of the optimizer's parameters" in caplog.text


def test_an_optimizer_that_is_wrapped_already_is_refused_and_trains_on() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0)) as optimizer:
        with pytest.raises(fastps.UsageError, match="found DistributedOptimizer, wrapped already"):
            fastps.DistributedOptimizer(optimizer)
        weight.sum().backward()
        optimizer.step()
        assert weight.tolist() == [-1.0, -1.0]


class Counting(torch.optim.SGD):
    """Counts its steps, and has an option of its own that is in no group."""

    count, note = 0, "of the class"

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


@pytest.mark.parametrize("server", ["workers", "process"])
def test_an_attribute_of_the_wrapped_optimizer_is_read_where_it_has_its_value(server: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    with fastps.DistributedOptimizer(Counting([weight], lr=1.0), server=server) as optimizer:
        weight.sum().backward()
        optimizer.step()
        if server == "process":
            with pytest.raises(AttributeError, match="'count' is an attribute of the wrapped Counting, which another process"):
                print(optimizer.count)
        else:
            assert (optimizer.count, optimizer.note) == (1, "of the class")
        assert not hasattr(optimizer, "other")


def test_lr_schedulers_of_the_wrapped_optimizer_see_no_step_that_is_missing() -> None:
    model, inner = _fresh()
    with warnings.catch_warnings(), fastps.DistributedOptimizer(inner) as optimizer:
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        for step in range(3):
            _train(model, optimizer, range(step, step + 1))
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05 / 8


def test_a_worker_that_is_done_stays_until_the_others_of_the_start_have_come() -> None:
    """Under asp nobody waits for anybody, and who came after the last had left would find no job."""
    said = mmap.mmap(-1, 1)

    def work(rank: int) -> int:
        model, inner = _fresh()
        while rank and not said[0]:
            time.sleep(0.001)
        time.sleep(0.5 * rank)
        optimizer = fastps.DistributedOptimizer(inner, sync="asp", timeout_s=30)
        _train(model, optimizer, range(3))
        said[0] = 1
        optimizer.close()
        return optimizer.worker.own_steps

    assert processes.results(processes.start_job(work, 3), 60) == [3, 3, 3]


def test_a_worker_that_is_done_gives_up_those_that_never_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("FASTPS_JOB", f"alone-{os.getpid()}")
    with one_worker(torch.nn.Linear(4, 3), sync="asp", timeout_s=0.3) as (model, optimizer):
        _train(model, optimizer, range(3))
    assert "waited 0.3 s for initial workers that never attached" in caplog.text


def test_parameters_that_share_memory_are_refused_by_name() -> None:
    first, second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    second.weight.data = first.weight.data
    with pytest.raises(fastps.UnsupportedError, match="share memory: expected tied weights to be one Parameter"):
        fastps.DistributedOptimizer(torch.optim.SGD([first.weight, second.weight], lr=0.1))
    base = torch.zeros(6)
    parts = [torch.nn.Parameter(part) for part in (base[3:], base[:2], base[1:3])]
    with pytest.raises(fastps.UnsupportedError, match=r"'param_groups\[0\]\[1\]' and 'param_groups\[0\]\[2\]' share memory"):
        fastps.DistributedOptimizer(torch.optim.SGD(parts, lr=0.1))
    fastps.DistributedOptimizer(torch.optim.SGD(parts[:2], lr=0.1)).close()


def test_other_weights_are_shown_for_an_evaluation_and_reach_nobody() -> None:
    with one_worker(torch.nn.Linear(4, 3), OPTIMIZERS["momentum"]) as (model, optimizer):
        _train(model, optimizer, range(2))
        before = [parameter.clone() for parameter in model.parameters()]
        with optimizer.shown_weights(torch.zeros_like(parameter) for parameter in model.parameters()):
            assert all(not parameter.any() for parameter in model.parameters())
        for others in ([weight[None] for weight in before], before[:1]):
            with pytest.raises(ValueError, match="in their order and shapes, found"), optimizer.shown_weights(others):
                pass
        assert all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
        _train(model, optimizer, range(2, 3))


def test_a_lazy_layer_without_a_shape_is_refused_by_name_and_trains_after_a_forward() -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(1))
    with pytest.raises(fastps.UnsupportedError, match=r"parameter '0.weight': expected a shape.*forward pass"):
        fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    model(torch.ones(2, 3))
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model) as optimizer:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        assert optimizer.version == 1


@pytest.mark.parametrize("ending", ["return", "raise", "exit"])
@pytest.mark.sampled(3)
def test_a_child_that_multiprocessing_made_leaves_when_it_ends(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FASTPS_JOB", f"child-{os.getpid()}-{ending}")
    child = multiprocessing.get_context("fork").Process(target=_end_without_closing, args=(ending,))
    child.start()
    monkeypatch.setenv("RANK", "0")
    model, inner = _fresh()
    try:
        with fastps.DistributedOptimizer(inner, sync="asp", timeout_s=20) as optimizer:
            what = "RuntimeError: the disk is full" if ending == "raise" else "SystemExit: 3"
            fails = pytest.raises(fastps.WorkerDiedError, match=f"worker 1 .* failed: {what}")
            with contextlib.nullcontext() if ending == "return" else fails:
                optimizer.wait_for_start()  # already tells, if the other has ended by then
                child.join()
                time.sleep(0.06)  # beyond the time between two looks
                _train(model, optimizer, range(3))
    finally:
        child.join()


def _end_without_closing(ending: str) -> None:
    os.environ["RANK"] = "1"
    model, inner = _fresh()
    optimizer = fastps.DistributedOptimizer(inner, sync="asp", timeout_s=20)
    optimizer.wait_for_start()
    _train(model, optimizer, range(1))
    if ending == "raise":
        raise RuntimeError("the disk is full")
    if ending == "exit":
        sys.exit(3)


def test_too_little_memory_beside_the_arena_for_the_workers_gradients_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for free, told in ((1000 * 4, 0), (1000 * 4 - 1, 1)):
        monkeypatch.setattr("fastps.torch.join.available_bytes", lambda free=free: (free, "limit of the test"))
        caplog.clear()
        fastps.DistributedOptimizer(torch.optim.SGD(torch.nn.Linear(1000, 1).parameters(), lr=0.1)).close()
        found = [record.getMessage() for record in caplog.records if "the kernel may kill a worker" in record.getMessage()]
        assert len(found) == told, found


# -- parameters and calls that are rare -----------------------------------------------------------------------------------


def test_parameters_cut_from_one_tensor_train_in_two_optimizers() -> None:
    first, second = (torch.nn.Parameter(each) for each in torch.ones(2, 3).unbind())
    one, other = (fastps.DistributedOptimizer(torch.optim.SGD([each], lr=0.25)) for each in (first, second))
    for _ in range(2):
        one.zero_grad()
        other.zero_grad()
        (first + 2 * second).sum().backward()
        one.step()
        other.step()
    assert (first.tolist(), second.tolist()) == ([0.5] * 3, [0.0] * 3)
    one.close()
    other.close()


class Named(torch.nn.Parameter):
    """A parameter of a library that has a class of its own for them."""


def test_a_parameter_of_a_subclass_that_is_pointed_elsewhere_has_the_value_there() -> None:
    parameter = Named(torch.ones(2))
    with fastps.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5)) as optimizer:
        for _ in range(2):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        assert parameter.tolist() == [0.0, 0.0]
        parameter.data = torch.full((2,), 5.0)
        optimizer.step()
        assert parameter.tolist() == [4.5, 4.5]


@pytest.mark.skipif(not hasattr(torch.nn.Parameter(torch.ones(1)), "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_may_be_of_another_type_than_its_parameter() -> None:
    def train(wrap: Callable[[Any], Any]) -> list[float]:
        parameter = torch.nn.Parameter(torch.ones(3))
        parameter.grad_dtype = torch.bfloat16  # type: ignore[attr-defined]
        optimizer = wrap(torch.optim.SGD([parameter], lr=0.1))
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * 1.7).sum().backward()
            optimizer.step()
        return parameter.tolist()

    found, expected = with_and_without(train)
    assert found == pytest.approx(expected, rel=1e-6)


WRONG: dict[str, dict[str, Any]] = {
    "LBFGS": {"sync": "bsp,clip=1"},
    "push_dtype": {"push_dtype": torch.complex64},
    "on_worker_loss": {"on_worker_loss": "other"},
    "server": {"server": "other"},
    "every": {"checkpoint": "here", "every": 0},
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.sampled(5)
def test_an_optimizer_that_cannot_be_wrapped_leaves_the_job_of_its_parameters_as_it_was(wrong: str) -> None:
    """And is not counted: a script that falls back to another optimizer resumes from that one's checkpoints."""
    with one_worker(torch.nn.Linear(2, 1)) as (model, optimizer):
        inner = (torch.optim.LBFGS if wrong == "LBFGS" else torch.optim.SGD)(model.parameters(), lr=0.1)
        counted = jobs_of_process._next[0]
        with pytest.raises(fastps.Error, match=wrong):
            fastps.DistributedOptimizer(inner, **WRONG[wrong])
        assert jobs_of_process._next[0] == counted or wrong == "every"
        steps_on(model, optimizer, torch.ones(1, 2))
        assert optimizer.version == 1


def test_a_job_whose_close_was_interrupted_ends_before_the_next_of_its_parameters() -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    first = fastps.DistributedOptimizer(inner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(first._job, "leave", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            first.close()
    assert not first.worker.closed
    with fastps.DistributedOptimizer(inner):
        assert first.worker.closed
    steps_on(model, inner, torch.ones(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer: optimizer.load_state_dict(optimizer.state_dict()),
        lambda optimizer: optimizer.replace_weights(lambda weights: weights),
        lambda optimizer: optimizer.take_newest_weights(),
    ],
)
def test_weights_in_half_precision_that_were_loaded_after_wrapping_are_the_jobs(
    call: Callable[[Any], None], dtype: torch.dtype
) -> None:
    with one_worker(torch.nn.Linear(2, 1, bias=False, dtype=dtype), OPTIMIZERS["adam"], named=True) as (model, optimizer):
        model.load_state_dict({"weight": torch.full((1, 2), 2.0, dtype=dtype)})
        call(optimizer)
        model(torch.zeros(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
        assert optimizer.worker.weights["weight"].tolist() == [[2.0, 2.0]]


def test_the_end_of_an_inner_block_without_sync_does_not_end_the_outer_one() -> None:
    with one_worker(torch.nn.Linear(2, 1)) as (_, optimizer), optimizer.no_sync():
        with optimizer.no_sync():
            pass
        with pytest.raises(fastps.UsageError, match=r"step\(\) was called inside no_sync"):
            optimizer.step()


def test_what_a_closed_optimizer_leaves_to_a_script() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    steps_on(model, optimizer, torch.ones(1, 2))
    optimizer.close()
    with pytest.raises(fastps.UsageError, match="worker 0 is closed"), optimizer.private_weights():
        pass
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # which torch refuses for a tensor with a weak reference
    try:
        assert model.half().weight.dtype == torch.float16
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
