"""A model's buffers travel with the versions of the training that fastps wraps."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from fastps.job.layout import Description
from fastps.kernels.shm.arena import LANE_JOINING, LANE_LIVE
from tests.support import processes
from tests.support.said import listen


def _model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def _job() -> str:
    return f"carried-{os.getpid()}"


def _wrapped(model: torch.nn.Module, sync: str = "bsp", **options: Any) -> fastps.DistributedOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return fastps.DistributedOptimizer(inner, sync, model=model, **{"job": _job(), "workers": 1, "rank": 0, **options})


def _step(model: torch.nn.Module, optimizer: Any, generator: torch.Generator) -> None:
    optimizer.zero_grad()
    model(torch.randn(16, 4, generator=generator) * 3 + 1).square().mean().backward()
    optimizer.step()


def _equal(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    one, two = (dict(each.named_parameters()) | dict(each.named_buffers()) for each in (model, other))
    return all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_reader_has_the_buffers_of_each_version(sync: str, dtype: torch.dtype) -> None:
    model, other, generator = _model().to(dtype), _model(1).to(dtype), torch.Generator().manual_seed(2)
    generator_of = {"generator": generator}
    with _wrapped(model, sync) as optimizer, fastps.reader(_job()) as reader:
        assert reader.update(other) == 0 and _equal(model, other)
        for step in range(1, 8):
            optimizer.zero_grad()
            model((torch.randn(16, 4, **generator_of) * 3 + 1).to(dtype)).square().mean().backward()  # type: ignore[arg-type]
            optimizer.step()
            assert reader.update(other) == step and _equal(model, other)
            assert other.get_buffer("1.num_batches_tracked").item() == step
        assert set(reader.weights) == {*dict(model.named_parameters()), *dict(model.named_buffers())}


def test_buffers_are_copied_only_while_anybody_reads() -> None:
    model, other, generator = _model(), _model(1), torch.Generator().manual_seed(2)
    said = listen()
    with _wrapped(model) as optimizer:
        brought: list[int] = []
        carried, bring = optimizer._job.carried, optimizer._job.carried._bring
        carried._bring = lambda slot: (brought.append(slot), bring(slot))  # type: ignore[method-assign,assignment,func-returns-value]
        for _ in range(3):
            _step(model, optimizer, generator)
        assert not brought
        with fastps.reader(_job()) as reader:
            assert reader.update(other) == 3 and _equal(model, other), "this thread would wait for itself"
            assert not said and not brought
            _step(model, optimizer, generator)
            assert reader.update(other) == 4 and _equal(model, other)
        assert len(brought) == 1


@pytest.mark.slow
def test_an_update_waits_for_the_first_push_with_buffers() -> None:
    def train(ready: Callable[[], object]) -> None:
        model, generator = _model(), torch.Generator().manual_seed(2)
        with _wrapped(model, job=job) as optimizer:
            for step in range(2000):
                _step(model, optimizer, generator)
                if step == 5:
                    ready()

    job = _job()
    child = processes.start_ready(train)
    other, optimizer_of = _model(1), []
    with fastps.reader(job) as reader:
        version = reader.update(other)
        assert version > 5 and other.get_buffer("1.num_batches_tracked").item() == version
        optimizer_of.append(version)
    processes.results([child], 60)


def _train_alone(job: str, rank: int, steps: int, after: Callable[[int], None] = lambda step: None) -> None:
    """A worker of two whose model's buffer says which it is and how far."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model.register_buffer("mine", torch.tensor([float(rank), 0.0]))
    with _wrapped(model, "asp", workers=2, rank=rank, job=job, on_worker_loss="continue") as optimizer:
        optimizer.wait_for_start()
        lane_states = optimizer.worker.store.arena.lane_states
        for step in range(steps):
            model.get_buffer("mine")[1] = step
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            after(step)
            if rank and step == steps // 2:  # the rest it makes alone
                processes.wait_until(lambda: lane_states()[0] not in (LANE_LIVE, LANE_JOINING), 60)


def test_a_reader_that_comes_between_a_push_and_its_version_gets_no_buffers_of_before_the_push() -> None:
    def read() -> tuple[int, float]:
        other = _model(1)
        assert os.read(go[0], 1)
        with fastps.reader(job) as reader:
            os.write(here[1], b"h")
            reader.wait(1, timeout_s=60)
            return reader.update(other), other.get_buffer("1.num_batches_tracked").item()

    def come(slot: int) -> None:
        """In the place of bringing what nobody would read."""
        os.write(go[1], b"g")
        assert os.read(here[0], 1)
        carried.bring = bring  # type: ignore[method-assign]

    job, go, here = _job(), os.pipe(), os.pipe()
    child = processes.start(read)
    model, generator = _model(), torch.Generator().manual_seed(2)
    with _wrapped(model, job=job) as optimizer:
        carried, bring = optimizer._job.carried, optimizer._job.carried.bring
        carried.bring = come  # type: ignore[method-assign]
        for _ in range(100):
            _step(model, optimizer, generator)
            time.sleep(0.005)
    version, batches = processes.results([child], 60)[0]
    for end in (*go, *here):
        os.close(end)
    assert version == batches > 1


@pytest.mark.slow
def test_the_buffers_are_those_of_the_lowest_live_worker() -> None:
    """Worker 1 makes more steps, and goes on alone once worker 0 has left."""
    job, readers, seen = _job(), [], [0.0]
    other = torch.nn.Sequential(torch.nn.Linear(1, 1))
    other.register_buffer("mine", torch.zeros(2))

    def look(step: int) -> None:
        if not readers:
            readers.append(fastps.reader(job))
        elif readers[0].update(other):
            worker, brought = other.get_buffer("mine").tolist()
            assert worker == 0 and seen[-1] <= brought <= step, "a version may hold pushes of worker 1 alone since"
            seen.append(brought)

    child = processes.start(lambda: _train_alone(job, 1, 600))
    _train_alone(job, 0, 50, look)
    assert not readers[0].wait(10**9, timeout_s=60)
    readers[0].update(other)
    assert other.get_buffer("mine").tolist() == [1.0, 599.0]
    readers[0].close()
    processes.results([child], 60)


def test_a_lowest_worker_whose_pushes_are_dropped_leaves_the_buffers_to_the_others() -> None:
    job, has_read = _job(), multiprocessing.get_context("fork").Event()

    def train(rank: int) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(1, 1))
        model.register_buffer("mine", torch.tensor([float(rank), 0.0]))
        with _wrapped(model, "backup:1", workers=2, rank=rank, job=job) as optimizer:
            optimizer.wait_for_start()
            while not has_read.is_set():
                model.get_buffer("mine")[1] += 1
                time.sleep(0.001 if rank else 0.05)
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()

    workers, found = processes.start_each(train, 2), []
    other = torch.nn.Sequential(torch.nn.Linear(1, 1))
    other.register_buffer("mine", torch.zeros(2))
    with fastps.reader(job) as reader:
        while sum(rank for rank, _ in found) < 10:
            assert reader.wait(timeout_s=30)
            reader.update(other)
            found.append(other.get_buffer("mine").tolist())
        has_read.set()
    processes.results(workers, 60)
    of_worker_1 = [step for rank, step in found if rank]
    assert of_worker_1 == sorted(set(of_worker_1)), "each version has newer ones"


def test_a_buffer_of_another_shape_is_the_readers_own() -> None:
    model, other, generator = _model(), _model(1), torch.Generator().manual_seed(2)
    other[1] = torch.nn.Identity()  # type: ignore[index]
    model[1] = torch.nn.BatchNorm1d(8, affine=False)  # type: ignore[index]
    with _wrapped(model) as optimizer, fastps.reader(_job()) as reader:
        _step(model, optimizer, generator)
        assert reader.update(other) == 1
        assert torch.equal(other.get_parameter("0.weight"), model.get_parameter("0.weight"))


def test_replaced_weights_keep_their_buffers() -> None:
    model, other, generator = _model(), _model(1), torch.Generator().manual_seed(2)
    with _wrapped(model) as optimizer, fastps.reader(_job()) as reader:
        reader.update(other)
        _step(model, optimizer, generator)
        optimizer.replace_weights([torch.ones_like(each) for each in model.parameters()])
        reader.update(other)
        assert _equal(model, other) and other.get_parameter("0.weight").eq(1).all()


def test_several_shards_version_the_buffers_with_the_last() -> None:
    model, other, generator = _model(), _model(1), torch.Generator().manual_seed(2)
    with _wrapped(model, "psp:1,1,shards=3") as optimizer, fastps.reader(_job()) as reader:
        for _ in range(5):
            _step(model, optimizer, generator)
            reader.update(other)
            assert _equal(model, other)


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_an_optimizer_in_python_has_its_models_buffers_in_each_version(sync: str) -> None:
    """Its weights buffers get their pages with their first version; under asp a server folds."""
    model, other, generator = _model(), _model(1), torch.Generator().manual_seed(2)
    inner = torch.optim.ASGD(model.parameters(), lr=0.01)
    optimizer = fastps.DistributedOptimizer(inner, sync, model=model, job=_job(), workers=1, rank=0)
    with optimizer, fastps.reader(_job()) as reader:
        for step in range(6):
            assert reader.update(other) == step and _equal(model, other)
            _step(model, optimizer, generator)


def test_a_buffer_that_the_model_has_no_more_is_not_brought_and_stops_nobody() -> None:
    model, other, generator = _model(), _model(1), torch.Generator().manual_seed(2)
    model.register_buffer("gone", torch.zeros(1))
    other.register_buffer("gone", torch.ones(1))
    with _wrapped(model) as optimizer, fastps.reader(_job()) as reader:
        _step(model, optimizer, generator)
        assert reader.update(other) == 1 and _equal(model, other)
        model.gone = None
        _step(model, optimizer, generator)
        assert reader.update(other) == 2
        assert torch.equal(other.get_parameter("0.weight"), model.get_parameter("0.weight"))
        del model.gone
        _step(model, optimizer, generator)
        assert reader.update(other) == 3


@pytest.mark.parametrize("change", [
    {"type": "float99"}, {"offset": 0}, {"offset": 1 << 40}, {"shape": [-1]}, {"shape": [1 << 40]}, {"stride": ["x"]},
    {"shard": -1},
])  # fmt: skip
def test_a_description_of_what_is_carried_that_a_stranger_wrote_is_refused(change: dict[str, Any]) -> None:
    with _wrapped(_model()) as optimizer:
        found = json.loads(optimizer.worker.store.layout.text())
    assert Description.of(json.dumps(found)).carried
    found["carried"][1] |= change
    with pytest.raises(ValueError, match="expected the description of a job"):
        Description.of(json.dumps(found))
