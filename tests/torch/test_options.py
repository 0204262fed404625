"""What the papers add to a torch loop: own rules, clipping, averages, schedules over updates, batches that are tuned."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import fastps
from tests.support.rules import lazy_rule
from tests.support.torch_optimizers import BATCH, batches_of, new_model, one_worker, relative_difference, train_on


@lazy_rule(state=("buffer",), hyper=("learning_rate", "momentum"))
def momentum_rule(weight: float, gradient: float, buffer: float, learning_rate: float, momentum: float) -> tuple[float, float]:
    buffer = momentum * buffer + gradient
    return weight - learning_rate * buffer, buffer


def test_a_users_rule_of_the_same_arithmetic_equals_torch_under_a_scheduler() -> None:
    plain, model = new_model(), new_model()
    batches = batches_of(25, BATCH)

    def train(model: torch.nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for _ in range(2):
            train_on(model, optimizer, batches)
            scheduler.step()

    train(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))
    inner = fastps.RuleOptimizer(model.parameters(), momentum_rule(), learning_rate=0.05, momentum=0.9)
    with fastps.DistributedOptimizer(inner, sync="bsp", model=model) as optimizer:
        train(model, optimizer)
        assert list(optimizer.state_dict()["state"][0]) == ["step", "buffer"]
    assert relative_difference(model, plain) < 1e-5


def test_a_rule_optimizer_says_what_it_misses_and_does_not_step_by_itself() -> None:
    model = new_model()
    with pytest.raises(TypeError, match=r"expected the hyper-parameters lr, momentum, found lr"):
        fastps.RuleOptimizer(model.parameters(), momentum_rule(), learning_rate=0.05)
    with pytest.raises(fastps.UsageError, match="wrap it in"):
        fastps.RuleOptimizer(model.parameters(), momentum_rule(), learning_rate=0.05, momentum=0.9).step()


def _batches(steps: int, dtype: torch.dtype) -> list[Any]:
    return [(inputs.to(dtype), labels) for inputs, labels in batches_of(steps, BATCH)]


PRECISIONS = pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=["single", "double"]
)


@PRECISIONS
def test_each_push_is_clipped_to_a_global_norm_as_torch_clips_it(dtype: torch.dtype, most: float) -> None:
    plain, batches = new_model().to(dtype), _batches(30, dtype)
    clip = lambda _: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)  # noqa: E731
    train_on(plain, torch.optim.SGD(plain.parameters(), lr=0.5), batches, clip)
    for sync in ("bsp,clip=0.1", "bsp,clip=0.1,shards=3"):
        model = new_model().to(dtype)
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), sync=sync, model=model) as optimizer:
            train_on(model, optimizer, batches)
        assert relative_difference(model, plain) < most, sync


def test_gradients_that_a_grad_scaler_has_multiplied_are_clipped_to_the_norm_that_they_have_without_it() -> None:
    plain, model, batches = new_model(), new_model(), batches_of(10, BATCH)
    clip = lambda _: torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)  # noqa: E731
    train_on(plain, torch.optim.SGD(plain.parameters(), lr=0.5), batches, clip)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    with fastps.DistributedOptimizer(inner, sync="bsp,clip=0.1", model=model) as optimizer:
        for inputs, labels in batches:
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(model(inputs), labels)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert relative_difference(model, plain) < 1e-5


@PRECISIONS
@pytest.mark.parametrize("sync", ["bsp", "bsp,shards=3"])
def test_the_average_of_the_weights_is_that_of_torchs_averaged_model(sync: str, dtype: torch.dtype, most: float) -> None:
    plain, model, batches = new_model().to(dtype), new_model().to(dtype), _batches(30, dtype)
    averaged = torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(plain)
    optimizer_of_plain = torch.optim.SGD(plain.parameters(), lr=0.05)
    for batch in batches:
        train_on(plain, optimizer_of_plain, [batch])
        averaged.update_parameters(plain)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    with fastps.DistributedOptimizer(inner, sync=f"{sync},ema=0.9", model=model) as optimizer:
        train_on(model, optimizer, batches)
        places = [parameter.data_ptr() for parameter in model.parameters()]
        with optimizer.averaged_weights():
            assert relative_difference(model, averaged.module) < most
        assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("sync", ["bsp", "asp,shards=2"])
@pytest.mark.parametrize("way", ["model", "model, then optimizer", "replace_weights"])
def test_the_average_begins_with_weights_that_are_loaded_after_wrapping(way: str, sync: str) -> None:
    model, loaded = new_model(), new_model(seed=1)
    expected = torch.nn.utils.parameters_to_vector(loaded.parameters())
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    with fastps.DistributedOptimizer(inner, sync=f"{sync},ema=0.9", model=model) as optimizer:
        if way == "replace_weights":
            optimizer.replace_weights(loaded.state_dict())
        else:
            model.load_state_dict(loaded.state_dict())
        if way == "model, then optimizer":
            optimizer.load_state_dict(optimizer.state_dict())
        train_on(model, optimizer, batches_of(3, BATCH))
        with optimizer.averaged_weights():
            assert torch.allclose(torch.nn.utils.parameters_to_vector(model.parameters()), expected)


def test_a_global_schedule_counts_the_jobs_updates_not_the_workers_steps() -> None:
    with one_worker(sync="asp") as (model, optimizer):
        schedule = fastps.exponential_decay(optimizer, 0.1, updates=10)
        for batch in batches_of(10, BATCH):
            train_on(model, optimizer, [batch])
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        with pytest.raises(ValueError, match="found decay=0, updates=1"):
            fastps.exponential_decay(optimizer, 0, 1)


def test_a_global_schedule_is_saved_and_loaded_as_torchs_are(tmp_path: Path) -> None:
    path = tmp_path / "schedule.pt"
    with one_worker() as (model, optimizer):
        schedule = fastps.exponential_decay(optimizer, 0.1, updates=10)
        train_on(model, optimizer, batches_of(10, BATCH))
        schedule.step()
        torch.save(schedule.state_dict(), path)
        again = fastps.exponential_decay(optimizer, 0.1, updates=10)
        again.load_state_dict(torch.load(path))
        assert again.state_dict() == schedule.state_dict()
        train_on(model, optimizer, batches_of(10, BATCH))
        again.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_batches_follow_the_size_that_the_grant_carries() -> None:
    with one_worker(sync="r2sp:0.8,tune=true", named=True, batch_size=4) as (model, optimizer):
        data = torch.utils.data.TensorDataset(torch.randn(50, 13), torch.randint(3, (50,)))
        loader = torch.utils.data.DataLoader(data, batch_sampler=fastps.BatchSampler(50, optimizer))
        sizes = []
        for inputs, labels in loader:
            sizes.append(len(labels))
            train_on(model, optimizer, [(inputs, labels)])
        assert sum(sizes) == 50
        assert sizes[0] == 4
        assert optimizer.batch_size >= 4
    with fastps.DistributedOptimizer(torch.optim.SGD(new_model().parameters(), lr=0.1)) as optimizer:
        with pytest.raises(ValueError, match="batch_size"):
            fastps.BatchSampler(50, optimizer)


@pytest.mark.parametrize("begun", [3, 7, 20])  # in the first pass, at its end, and in the third
def test_batches_of_a_resumed_job_go_on_where_it_ended(tmp_path: Path, begun: int) -> None:
    drawn: list[list[list[int]]] = []
    for first, last, options in ((0, begun, {}), (begun, 25, {"resume": tmp_path}), (0, 25, {})):
        model = new_model()
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), batch_size=8, **options) as optimizer:
            found: list[list[int]] = []
            sampler = fastps.BatchSampler(50, optimizer)
            while len(found) < last - first:
                for batch in sampler:
                    found.append(batch)
                    train_on(model, optimizer, batches_of(1, BATCH))
                    if len(found) == last - first:
                        break
            drawn.append(found)
            if not first and last == begun:
                fastps.save(optimizer, tmp_path)
    assert drawn[0] + drawn[1] == drawn[2]


def test_a_scheme_that_counts_samples_asks_for_them_by_name() -> None:
    with one_worker(sync="hardsync:64", named=True) as (model, optimizer):
        with pytest.raises(fastps.UsageError, match=r"report_loss\(loss, samples\)"):
            train_on(model, optimizer, batches_of(1, BATCH))


def test_hardsync_scales_the_learning_rate_by_the_root_of_samples_over_reference() -> None:
    plain, model = new_model(), new_model()
    batches = batches_of(20, BATCH)
    train_on(plain, torch.optim.SGD(plain.parameters(), lr=0.1 * 0.5), batches)  # sqrt(16 / 64)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastps.DistributedOptimizer(inner, sync="hardsync:64", model=model, batch_size=BATCH) as optimizer:
        train_on(model, optimizer, batches)
    assert relative_difference(model, plain) < 1e-6


def test_step_hooks_run_as_torch_runs_them() -> None:
    calls = []
    with one_worker() as (model, optimizer):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train_on(model, optimizer, batches_of(1, BATCH))
        assert (calls, optimizer.version) == (["before", "after"], 1)
        remove = register_optimizer_step_post_hook(lambda *_: calls.append("everywhere"))
        train_on(model, optimizer, batches_of(1, BATCH))
        remove.remove()
        assert "everywhere" in calls[2:]
