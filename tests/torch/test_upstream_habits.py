"""What training scripts do with a model between steps: they freeze, grow, load, copy and save it. Each does what torch does."""

import copy
import io
import mmap
import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from tests.support import processes
from tests.support.torch_optimizers import (
    BATCH,
    as_in_torch,
    batches_of,
    new_model,
    one_worker,
    relative_difference,
    share_of,
    train_on,
    with_and_without,
)

SYNCS = ["bsp", "asp", "ssp:1", "dssp:1,3"]
Wrap = Callable[[torch.optim.Optimizer], Any]


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def _are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


# -- parameters that are frozen and unfrozen ---------------------------------------------------------


def _train_in_phases(wrap: Wrap) -> list[torch.Tensor]:
    """Fine-tuning: the first layer is frozen at first, then trains, then the last one is frozen."""
    model = new_model()
    model[0].requires_grad_(False)
    optimizer = wrap(_momentum(model.parameters()))
    batches, first = batches_of(12, BATCH), model[0].weight.detach().clone()
    train_on(model, optimizer, batches[:4])
    assert torch.equal(model[0].weight, first)
    model[0].requires_grad_(True)
    train_on(model, optimizer, batches[4:8])
    assert not torch.equal(model[0].weight, first)
    model[4].requires_grad_(False)
    optimizer.zero_grad()
    last = model[4].weight.detach().clone()
    train_on(model, optimizer, batches[8:])
    assert torch.equal(model[4].weight, last)
    return _values(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", SYNCS)
def test_parameters_that_are_frozen_and_unfrozen_train_as_in_torch(sync: str) -> None:
    assert _are_equal(*with_and_without(_train_in_phases, sync=sync))


def test_parameter_that_was_frozen_when_wrapped_pushes_during_backward() -> None:
    model = new_model()
    model[0].requires_grad_(False)
    with fastps.DistributedOptimizer(_momentum(model.parameters())) as optimizer:
        assert not model[0].weight.requires_grad
        model[0].requires_grad_(True)
        (inputs, labels), *_ = batches_of(1, BATCH)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        assert _is_in_arena(model[0].weight.grad, optimizer)


def test_sparse_layer_that_is_unfrozen_later_trains() -> None:
    layer = torch.nn.Embedding(5, 3, sparse=True)
    layer.weight.requires_grad_(False)
    before = layer.weight.clone()
    with fastps.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.5), model=layer) as optimizer:
        optimizer.step()
        layer.weight.requires_grad_(True)
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()
        assert torch.equal(layer.weight.detach(), before - 0.5 * torch.eye(5)[:, 1:2])


def test_sparse_gradient_that_is_set_by_hand_is_refused_by_name() -> None:
    with one_worker(torch.nn.Linear(3, 5, bias=False), named=True) as (layer, optimizer):
        layer.weight.grad = torch.ones(5, 3).to_sparse()
        with pytest.raises(fastps.UnsupportedError, match=r"'weight': expected a dense gradient"):
            optimizer.step()


# -- parameters that are added -----------------------------------------------------------------------


def test_parameters_that_are_added_or_exchanged_are_refused_with_the_cure() -> None:
    with one_worker(make=_momentum) as (model, optimizer):
        inner = optimizer._inner
        with pytest.raises(fastps.UsageError, match=r"calls inner = optimizer\.unwrap\(\), .* wraps it again"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        train_on(model, optimizer, batches_of(1, BATCH))
        kept = list(inner.param_groups[0]["params"])
        inner.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(2)))
        with pytest.raises(fastps.UsageError, match=r"param_groups\[0\]: expected the 6 parameters .* found 7, or others"):
            train_on(model, optimizer, batches_of(1, BATCH))
        inner.param_groups[0]["params"][:] = [torch.nn.Parameter(kept[0].detach().clone()), *kept[1:]]
        with pytest.raises(fastps.UsageError, match=r"found 6, or others in their place"):
            train_on(model, optimizer, batches_of(1, BATCH))
        inner.param_groups[0]["params"][:] = kept
        train_on(model, optimizer, batches_of(1, BATCH))
        assert optimizer.version == 2


def _grow_and_train(wrap: Wrap, batches: list[Any], middle: int) -> list[torch.Tensor]:
    """Train; add a layer, whose parameters get a group with another learning rate; train on."""
    model = new_model()
    optimizer = wrap(_momentum(model.parameters()))
    train_on(model, optimizer, batches[:middle])
    inner = getattr(optimizer, "unwrap", lambda: optimizer)()
    torch.manual_seed(5)
    model.append(torch.nn.Linear(3, 3))
    inner.add_param_group({"params": list(model[-1].parameters()), "lr": 0.02})
    optimizer = wrap(inner)
    train_on(model, optimizer, batches[middle:])
    getattr(optimizer, "close", lambda: None)()
    return _values(model)


@pytest.mark.parametrize("workers", [1, 2])
def test_model_that_grows_is_wrapped_anew_and_trains_on_as_in_torch(workers: int) -> None:
    batches = batches_of(8, workers * BATCH)

    def work(rank: int) -> list[list[float]]:
        wrap = lambda inner: fastps.DistributedOptimizer(inner, sync="bsp", timeout_s=30)  # noqa: E731
        return [value.flatten().tolist() for value in _grow_and_train(wrap, share_of(batches, rank), 4)]

    expected = _grow_and_train(lambda inner: inner, batches, 4)
    for outcome in processes.results(processes.start_job(work, workers), 60):
        for found, value in zip(outcome, expected, strict=True):
            np.testing.assert_allclose(found, value.flatten().numpy(), rtol=0, atol=1e-5)


def test_no_push_is_lost_when_a_model_grows_under_asp() -> None:
    """The workers come to the end of the first job at different times: its last pushes are in the second one's weights."""

    def push(weights: list[torch.Tensor], optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            optimizer.step()

    def work(rank: int) -> tuple[list[float], int]:
        weights = [torch.nn.Parameter(torch.zeros(3))]
        inner = torch.optim.SGD(weights, lr=1.0)
        optimizer = fastps.DistributedOptimizer(inner, sync="asp", timeout_s=30)
        push(weights, optimizer, 5)
        time.sleep(0.1 * rank)
        push(weights, optimizer, 10 * rank)
        assert optimizer.unwrap() is inner
        weights.append(torch.nn.Parameter(torch.zeros(2)))
        inner.add_param_group({"params": weights[1:]})
        optimizer = fastps.DistributedOptimizer(inner, sync="asp", timeout_s=30)
        push(weights, optimizer, 3)
        optimizer.wait_for_others()
        optimizer.close()
        return [float(weight[0]) for weight in weights], optimizer.version

    assert processes.results(processes.start_job(work, 2), 60) == [([-26.0, -6.0], 6)] * 2


def test_workers_that_evaluate_together_take_the_newest_weights_and_end_with_the_same() -> None:
    said = mmap.mmap(-1, 2)

    def meet(rank: int, number: int) -> None:
        said[rank] = number
        processes.wait_until(lambda: said[1 - rank] >= number, 60)

    def work(rank: int) -> list[float]:
        weight = torch.nn.Parameter(torch.zeros(3))
        inner = torch.optim.SGD([weight], lr=1.0)
        optimizer = fastps.DistributedOptimizer(inner, sync="asp", timeout_s=30)
        found = []
        for number in (1, 3):
            meet(rank, number)
            for _ in range(2 + 3 * rank):
                weight.grad = torch.ones_like(weight)
                optimizer.step()
            meet(rank, number + 1)
            optimizer.take_newest()
            found.append(float(weight[0]))
        optimizer.wait_for_others()
        assert optimizer.unwrap() is inner
        return [*found, float(weight[0])]

    assert processes.results(processes.start_job(work, 2), 60) == [[-7.0, -14.0, -14.0]] * 2


@pytest.mark.parametrize("end", ["wait_for_others", "unwrap", "wrap"])
def test_weights_that_worker_0_wrote_at_the_end_are_not_replaced_by_later_ones_in_silence(end: str) -> None:
    said = mmap.mmap(-1, 2)

    def work(rank: int) -> tuple[str, float]:
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync="asp", timeout_s=30)

        def step() -> None:
            weight.grad = torch.ones_like(weight)
            optimizer.step()

        step()
        said[rank] = 1
        processes.wait_until(lambda: said[1 - rank] >= 1, 60)
        if rank:
            step()
            optimizer.close()
            return "", 0.0
        with torch.no_grad():
            weight.fill_(7.0)  # the best weights, say
        ends: dict[str, Callable[[], Any]] = {
            "wait_for_others": optimizer.wait_for_others,
            "unwrap": optimizer.unwrap,
            "wrap": lambda: fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), sync="asp", timeout_s=30),
        }
        with pytest.raises(fastps.ParameterChangedError) as caught:
            ends[end]()
        optimizer.close()
        return str(caught.value), float(weight[0])

    (sentence, value), _ = processes.results(processes.start_job(work, 2), 60)
    assert "written to outside of step()" in sentence
    assert "after the training call close() first" in sentence
    assert value == 7.0


def test_writes_into_private_weights_are_gone_after_the_block() -> None:
    with one_worker(make=_momentum) as (model, optimizer):
        train_on(model, optimizer, batches_of(2, BATCH))
        before = _values(model)
        with optimizer.private_weights(), torch.no_grad():
            assert _are_equal(_values(model), before)
            for parameter in model.parameters():
                parameter.fill_(3.0)
        assert _are_equal(_values(model), before)
        train_on(model, optimizer, batches_of(1, BATCH))


# -- after the end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [_momentum, lambda parameters: torch.optim.Adam(parameters, lr=0.01)], ids=["sgd", "adam"])
def test_a_closed_optimizer_has_the_state_at_its_end_as_a_finished_torch_optimizer_has(make: Callable[[Any], Any]) -> None:
    model, plain = new_model(), new_model()
    inner = make(model.parameters())
    with fastps.DistributedOptimizer(inner) as optimizer:
        train_on(model, optimizer, batches_of(3, BATCH))
    expected = make(plain.parameters())
    train_on(plain, expected, batches_of(3, BATCH))
    for found in (optimizer.state_dict(), inner.state_dict(), optimizer.unwrap().state_dict()):
        assert found["param_groups"] == expected.state_dict()["param_groups"]
        torch.testing.assert_close(found["state"], expected.state_dict()["state"], rtol=1e-6, atol=1e-7)
    optimizer.zero_grad()
    assert optimizer.unwrap() is inner


# -- loading a state dict ----------------------------------------------------------------------------


def _train_and_go_back(wrap: Callable[..., Any]) -> list[torch.Tensor]:
    """Train, keep a copy of everything, train on, go back to the copy, train on."""
    model = new_model()
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model=model)
    batches = batches_of(9, BATCH)
    train_on(model, optimizer, batches[:3])
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5
    train_on(model, optimizer, batches[3:6])
    getattr(optimizer, "replace_weights", model.load_state_dict)(weights)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.01
    train_on(model, optimizer, batches[6:])
    assert optimizer.state_dict()["state"][0]["step"] == 6
    assert getattr(optimizer, "version", 9) == 9, "going back is no update, and takes none away"
    return _values(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", SYNCS)
def test_state_dicts_are_loaded_between_any_steps_as_in_torch(sync: str) -> None:
    torch.testing.assert_close(*with_and_without(_train_and_go_back, sync=sync), rtol=1e-6, atol=1e-7)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("sync", SYNCS)
def test_what_one_worker_loads_all_workers_have(sync: str) -> None:
    said = mmap.mmap(-1, 2)

    def work(rank: int) -> tuple[float, float]:
        model = new_model()
        inner = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)  # with lr=0 weights stay, and momentum moves
        with fastps.DistributedOptimizer(inner, sync=sync, model=model, timeout_s=30) as optimizer:
            train_on(model, optimizer, batches_of(3, BATCH))
            if rank == 1:
                optimizer.replace_weights({name: torch.full_like(value, 2.0) for name, value in model.state_dict().items()})
                said[1] = 1
            processes.wait_until(lambda: said[1], 60)
            train_on(model, optimizer, batches_of(1, BATCH))
            weights = {float(value) for parameter in model.parameters() for value in (parameter.min(), parameter.max())}
            said[rank] = 2
            if rank == 0:
                processes.wait_until(lambda: said[1] == 2, 60)
                state = optimizer.state_dict()
                for entry in state["state"].values():
                    entry["momentum_buffer"].fill_(7.0)
                optimizer.load_state_dict(state)
                said[0] = 3
            processes.wait_until(lambda: said[0] == 3, 60)
            buffers = [entry["momentum_buffer"] for entry in optimizer.state_dict()["state"].values()]
            assert all(bool((buffer == 7.0).all()) for buffer in buffers)
            assert len(weights) == 1
            return weights.pop(), float(buffers[0].max())

    assert processes.results(processes.start_job(work, 2), 60) == [(2.0, 7.0)] * 2


class _Normed(torch.nn.Module):
    """A layer that trains, one that the optimizer does not get, tied weights, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.body = torch.nn.Linear(4, 4)
        self.tied = torch.nn.Linear(4, 4, bias=False)
        self.tied.weight = self.body.weight
        self.backbone = torch.nn.Linear(4, 4)

    def trained(self) -> list[torch.nn.Parameter]:
        return [*self.norm.parameters(), *self.body.parameters()]


def test_state_dict_of_the_whole_model_brings_buffers_and_what_does_not_train_to_this_worker() -> None:
    torch.manual_seed(0)
    model, other = _Normed(), _Normed()
    other.norm.running_mean.fill_(3.0)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.trained(), lr=0.1), model=model) as optimizer:
        model.tied(model.body(model.norm(torch.ones(2, 4)))).sum().backward()
        optimizer.step()
        optimizer.replace_weights(other.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
        optimizer.zero_grad()
        model.tied(model.body(model.norm(torch.ones(2, 4)))).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("given", "sentence"), [
    (lambda own: {name: own[name] for name in own if name != "0.weight"}, r"none for 0\.weight; use model\.state_dict\(\)"),
    (lambda own: {**own, "extra": torch.zeros(1)}, "found all and the unknown extra"),
    (lambda own: {**own, "0.bias": torch.zeros(3)}, r"'0\.bias': expected .* shape \(17,\), found \(3,\)"),
    (lambda own: {**own, "0.bias": [0.0]}, r"'0\.bias': expected .* shape \(17,\), found list"),
    (lambda own: [torch.zeros(3)], "a tensor for each of 6 parameters"),
], ids=["a name is missing", "a name too many", "another shape", "a list", "tensors of another model"])  # fmt: skip
def test_weights_of_another_model_replace_nothing(given: Callable[[dict[str, Any]], Any], sentence: str) -> None:
    with one_worker(make=_momentum, named=True) as (model, optimizer):
        train_on(model, optimizer, batches_of(1, BATCH))
        before = _values(model)
        with pytest.raises(ValueError, match=sentence):
            optimizer.replace_weights(given(new_model(seed=1).state_dict()))
        assert _are_equal(_values(model), before)
        train_on(model, optimizer, batches_of(1, BATCH))


def test_names_need_the_model_that_has_them() -> None:
    model = new_model()
    with (
        fastps.DistributedOptimizer(_momentum(model.parameters())) as optimizer,
        pytest.raises(fastps.UsageError, match="pass model= to DistributedOptimizer, or a list of tensors"),
    ):
        optimizer.replace_weights(model.state_dict())


# -- copies of a model -------------------------------------------------------------------------------


def _is_in_arena(tensor: torch.Tensor | None, optimizer: fastps.DistributedOptimizer) -> bool:
    assert tensor is not None
    memory = np.frombuffer(optimizer.worker.store.memory, np.uint8)
    return 0 <= tensor.data_ptr() - memory.ctypes.data < memory.nbytes


def _check_copy(copied: torch.nn.Module, model: torch.nn.Module, optimizer: fastps.DistributedOptimizer) -> None:
    """The copy has the model's values in memory of its own, trains by itself, and the job goes on without it."""
    expected = _values(model)
    assert _are_equal(_values(copied), expected)
    for parameter in copied.parameters():
        assert not _is_in_arena(parameter, optimizer)
        assert parameter._post_accumulate_grad_hooks is None, "a hook of the optimizer came along"
    train_on(model, optimizer, batches_of(2, BATCH, seed=7))
    assert _are_equal(_values(copied), expected), "the copy changed with the job"
    job = _values(model)
    own = _momentum(copied.parameters())
    train_on(copied, own, batches_of(2, BATCH, seed=8))
    assert _are_equal(_values(model), job), "the job changed with the copy"
    assert not _are_equal(_values(copied), expected)
    assert not any(_is_in_arena(parameter.grad, optimizer) for parameter in copied.parameters())


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("sync", ["bsp", "asp"])
@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_of_a_model_is_private_at_any_time(copied_by: Callable[[Any], Any], sync: str) -> None:
    with one_worker(make=_momentum, sync=sync, named=True) as (model, optimizer):
        _check_copy(copied_by(model), model, optimizer)
        train_on(model, optimizer, batches_of(3, BATCH))
        _check_copy(copied_by(model), model, optimizer)
        (inputs, labels), *_ = batches_of(1, BATCH)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()  # p.grad is a view of the slot
        _check_copy(copied_by(model), model, optimizer)


def test_copy_of_a_plain_tensor_that_trains_is_private() -> None:
    tensor = torch.ones(3, requires_grad=True)
    with fastps.DistributedOptimizer(torch.optim.SGD([tensor], lr=0.5)) as optimizer:
        tensor.sum().backward()
        copied = copy.deepcopy(tensor)
        assert not _is_in_arena(copied, optimizer)
        assert not _is_in_arena(copied.grad, optimizer)
        optimizer.step()
        assert (copied.tolist(), tensor.tolist()) == ([1.0] * 3, [0.5] * 3)


def test_average_of_swa_utils_is_that_of_plain_torch() -> None:
    def average(model: torch.nn.Module, optimizer: Any) -> list[torch.Tensor]:
        averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for batch in batches_of(10, BATCH):
            train_on(model, optimizer, [batch])
            averaged.update_parameters(model)
        return _values(averaged.module)

    assert _are_equal(*as_in_torch(average, _momentum))


# -- saving ------------------------------------------------------------------------------------------


def _load_without_fastps(saved: bytes, **options: Any) -> Any:
    """What torch.load returns in a process in which `import fastps` fails; a module's state dict."""

    def load() -> Any:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fastps"]:
            sys.modules[name] = None  # type: ignore[assignment]
        found = torch.load(io.BytesIO(saved), **options)
        entries = found.state_dict() if isinstance(found, torch.nn.Module) else found
        return {name: value.tolist() for name, value in entries.items()}

    return processes.results([processes.start(load)], 30)[0]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("workers", [1, 2])
def test_any_worker_saves_a_small_file_that_loads_without_fastps(workers: int) -> None:

    def work(rank: int) -> list[tuple[bytes, bytes, dict[str, Any]]]:
        model, saved = new_model(seed=rank), []
        with fastps.DistributedOptimizer(_momentum(model.parameters()), sync="asp", model=model, timeout_s=30) as optimizer:
            for _ in range(2):
                weights, whole = io.BytesIO(), io.BytesIO()
                torch.save(model.state_dict(), weights)
                torch.save(model, whole)
                values = {name: value.tolist() for name, value in model.state_dict().items()}
                saved.append((weights.getvalue(), whole.getvalue(), values))
                train_on(model, optimizer, batches_of(3, BATCH))
        return saved

    plain = io.BytesIO()
    torch.save(new_model().state_dict(), plain)
    for outcome in processes.results(processes.start_job(work, workers), 60):
        for weights, whole, values in outcome:
            assert len(weights) <= len(plain.getvalue()) + 64, "the file has more than the weights"
            assert b"fastps" not in whole
            assert _load_without_fastps(weights, weights_only=True) == values
            assert _load_without_fastps(whole, weights_only=False) == values


def test_saved_optimizer_state_is_small_and_loads_without_fastps() -> None:
    model, plain = new_model(), new_model()
    inner = _momentum(plain.parameters())
    train_on(plain, inner, batches_of(2, BATCH))
    with fastps.DistributedOptimizer(_momentum(model.parameters())) as optimizer:
        train_on(model, optimizer, batches_of(2, BATCH))
        ours, theirs = io.BytesIO(), io.BytesIO()
        torch.save(optimizer.state_dict(), ours)
        torch.save(inner.state_dict(), theirs)
    assert b"fastps" not in ours.getvalue()
    assert len(ours.getvalue()) <= len(theirs.getvalue()) + 64 * 12
    reloaded = new_model()
    other = _momentum(reloaded.parameters())
    other.load_state_dict(torch.load(io.BytesIO(ours.getvalue()), weights_only=True))
    reloaded.load_state_dict(model.state_dict())
    train_on(reloaded, other, batches_of(2, BATCH, seed=3))
    train_on(plain, inner, batches_of(2, BATCH, seed=3))
    assert relative_difference(reloaded, plain) == 0.0
