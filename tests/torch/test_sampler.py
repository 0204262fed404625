"""Each worker's share of loaders, data sets and tensors: disjoint, another order in each pass, and where a job resumes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, WeightedRandomSampler

import fastps
from fastps.job import environment
from fastps.torch import foreign
from tests.support import commands
from tests.support.scripts import program
from tests.support.torch_optimizers import new_model


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process worker `rank` of `workers`."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)

    def be(rank: int, workers: int) -> None:
        monkeypatch.setenv("FASTPS_RANK", str(rank))
        monkeypatch.setenv("FASTPS_WORKERS", str(workers))

    return be


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


def _passes(loader: Any, count: int = 1) -> list[list[int]]:
    return [[int(number) for batch in loader for number in np.ravel(batch)] for _ in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("uneven", ["drop", "keep"])
def test_workers_draw_different_samples_of_one_order_which_is_another_in_each_pass(
    shuffle: bool, uneven: Any, worker: Any
) -> None:
    drawn = []
    for rank in range(4):
        worker(rank, 4)
        torch.manual_seed(rank)  # no share hangs on it
        loader = fastps.shard(DataLoader(Numbers(23), batch_size=2, shuffle=shuffle), uneven=uneven)
        drawn.append(_passes(loader, 3))
        assert len(loader.sampler) == len(drawn[-1][0]) and len(loader) == -(-len(loader.sampler) // 2)
    sizes = [len(each[0]) for each in drawn]
    assert sizes == ([5, 5, 5, 5] if uneven == "drop" else [6, 6, 6, 5])
    for number in range(3):
        together = list(itertools.chain.from_iterable(each[number] for each in drawn))
        assert len(set(together)) == len(together) == sum(sizes)
    orders = {tuple(each) for each in drawn[0]}
    assert len(orders) == (3 if shuffle else 1)
    assert shuffle or drawn[1][0] == [1, 5, 9, 13, 17, 21][: sizes[1]]


def test_a_share_has_the_loaders_class_and_options(worker: Any) -> None:
    class Own(DataLoader[int]):
        pass

    def negative(batch: list[int]) -> list[int]:
        return [-number for number in batch]

    worker(1, 2)
    given = Own(Numbers(11), 2, True, collate_fn=negative, drop_last=True, num_workers=1, persistent_workers=True)
    list(given)  # an iterator that persists is not taken over
    loader = fastps.shard(given, seed=3)
    assert type(loader) is Own and loader is not given and loader.dataset is given.dataset
    assert (loader.batch_size, loader.drop_last, loader.num_workers, loader.persistent_workers) == (2, True, 1, True)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [2, 2] == [2] * len(loader)
    assert all(number <= 0 for batch in batches for number in batch)
    assert fastps.shard(loader) is loader
    distributed: DataLoader[int] = DataLoader(Numbers(8), sampler=DistributedSampler(Numbers(8), 2, 1))
    assert fastps.shard(distributed) is distributed


def test_samples_without_batches_and_weighted_ones_are_shared_too(worker: Any) -> None:
    weights = torch.arange(20.0)
    drawn = []
    for rank in range(2):
        worker(rank, 2)
        assert _passes(fastps.shard(DataLoader(Numbers(5), batch_size=None))) == [[rank, rank + 2]]
        inner = torch.utils.data.BatchSampler(WeightedRandomSampler(weights, 12), 3, drop_last=False)
        drawn += _passes(fastps.shard(DataLoader(Numbers(20), batch_sampler=inner)))
    generator = torch.Generator().manual_seed(0)
    order = torch.multinomial(weights, 12, True, generator=generator).tolist()
    assert drawn == [order[0::2], order[1::2]]


def test_data_sets_tensors_lists_and_dicts_are_cut(worker: Any) -> None:
    worker(1, 3)
    tensor = torch.arange(10)
    shares = fastps.shard({"set": TensorDataset(tensor), "tensor": tensor, "list": list(range(10)), "array": np.arange(10)})
    assert [int(each[0]) for each in shares["set"]] == [1, 4, 7]
    assert [list(map(int, shares[name])) for name in ("tensor", "list", "array")] == [[1, 4, 7]] * 3
    worker(0, 3)
    assert fastps.shard(tensor, uneven="keep").tolist() == [0, 3, 6, 9]


@pytest.mark.parametrize(
    ("uneven", "expected"), [("drop", [[0, 3, 6], [1, 4, 7], [2, 5, 8]]), ("keep", [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]])]
)
def test_an_iterable_data_set_is_dealt_out(uneven: Any, expected: list[list[int]], worker: Any) -> None:
    drawn = []
    for rank in range(3):
        worker(rank, 3)
        loader = fastps.shard(DataLoader(Stream(10), batch_size=2), uneven=uneven)
        drawn += _passes(loader)
        assert list(fastps.shard(Stream(10), uneven=uneven)) == drawn[-1]
        assert fastps.shard(loader) is loader
    assert drawn == expected


def test_what_cannot_be_shared_is_refused_by_name(worker: Any) -> None:
    class Own(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter([0])

        def __len__(self) -> int:
            return 1

    worker(0, 2)
    with pytest.raises(
        fastps.UnsupportedError, match="shard: the loader has a Own, which may draw another order in each worker"
    ):
        fastps.shard(DataLoader(Numbers(3), sampler=Own()))
    with pytest.raises(fastps.UnsupportedError, match="the loader has a Own"):
        fastps.shard(DataLoader(Numbers(3), batch_sampler=Own()))  # type: ignore[arg-type]
    with pytest.raises(
        fastps.UsageError, match="expected a DataLoader, a data set, a tensor, a list, or a dict of these, found int"
    ):
        fastps.shard(3)
    with pytest.raises(fastps.UsageError, match="uneven: expected drop or keep, found 'pad'"):
        fastps.shard([1], uneven="pad")  # type: ignore[arg-type]


def _steps(model: torch.nn.Module, optimizer: fastps.DistributedOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 13)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("begun", [3, 6, 14])  # in the first pass, at its end, and in the third
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_resumed_job_goes_on_with_the_batch_behind_its_last(begun: int, drop_last: bool, tmp_path: Path) -> None:
    drawn: list[list[tuple[int, list[int]]]] = []
    for first, last, options in ((0, begun, {}), (begun, 20, {"resume": tmp_path}), (0, 20, {})):
        model = new_model()
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options) as optimizer:
            loader = fastps.shard(DataLoader(Numbers(45), batch_size=8, shuffle=True, drop_last=drop_last))
            found: list[tuple[int, list[int]]] = []
            while len(found) < last - first:
                epoch = loader.sampler.epoch
                for batch in loader:
                    found.append((epoch, batch.tolist()))
                    _steps(model, optimizer)
                    if len(found) == last - first:
                        break
            drawn.append(found)
            if not first and last == begun:
                fastps.save(optimizer, tmp_path)
    assert drawn[0] + drawn[1] == drawn[2]
    assert drawn[2][-1][0] == 19 // (5 if drop_last else 6)


@pytest.mark.parametrize(("samples", "batch", "drops", "is_told"), [
    (30, 16, True, True), (64, 16, True, False), (30, 16, False, False), (3, 2, False, True), (8, 16, True, False),
])  # fmt: skip
def test_a_share_without_a_batch_is_told_of(
    samples: int, batch: int, drops: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one alone has no batch where nobody has."""
    monkeypatch.setattr("fastps.torch.sampler._place", lambda optimizer: (3, 4, 0))
    loader = DataLoader(TensorDataset(torch.zeros(samples)), batch_size=batch, drop_last=drops)
    assert bool(list(fastps.shard(loader))) is not (is_told or samples == 8)
    assert ("this worker's share has no batch" in caplog.text) is is_told


def test_shares_go_by_the_number_in_the_whole_job_also_where_a_node_has_its_own(worker: Any) -> None:
    drawn = []
    for node in range(2):
        layout = SimpleNamespace(workers=1, policy=fastps.parse_policy("bsp"))
        attached = SimpleNamespace(rank=0, begun_at=0, store=SimpleNamespace(layout=layout))
        optimizer: Any = SimpleNamespace(worker=attached, batch_size=4, _identity=environment.Identity("job", node, 2))
        drawn.append(list(itertools.chain.from_iterable(fastps.BatchSampler(8, optimizer))))
        assert fastps.shard(torch.arange(4), optimizer).tolist() == [node, node + 2]
    assert sorted(drawn[0] + drawn[1]) == list(range(8))


# -- told of ---------------------------------------------------------------------------------------


def test_a_loader_that_shuffles_everything_in_every_worker_is_told_of(
    worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker(0, 2)
    monkeypatch.setenv("FASTPS_LAUNCHER", "a socket")
    monkeypatch.setattr(environment, "_divides", False)
    sizes = [len(each) for each in foreign._objects_of((torch.utils.data.RandomSampler,))]
    foreign.warn_of_undivided()
    caplog.clear()
    iterator = iter(DataLoader(Numbers(30), shuffle=True))  # a loader that nobody holds
    foreign.warn_of_undivided()
    (told,) = [record.message for record in caplog.records]
    assert any(f"a DataLoader shuffles all {size} samples" in told for size in (*sizes, 30))
    assert "each of the 2 workers trains on everything; use loader = fastps.shard(loader)" in told
    fastps.rank()  # a script that asks divides by itself
    foreign.warn_of_undivided()
    assert len(caplog.records) == 1 and iterator is not None


@pytest.mark.parametrize(("line", "steps", "times"), [
    ("", 8, 1),
    pytest.param("loader = fastps.shard(loader)", 4, 0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_script_that_trains_every_worker_on_everything_is_told_once_and_one_that_shards_is_not(
    line: str, steps: int, times: int, tmp_path: Path
) -> None:
    text = (
        "import torch, fastps\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(0)\nmodel = torch.nn.Linear(4, 1)\n"
        "opt = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))\n"
        "loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)\nSHARD\nsteps = 0\n"
        "for (x,) in loader:\n    opt.zero_grad()\n    model(x).sum().backward()\n    opt.step()\n    steps += 1\n"
        "opt.wait_for_others()\nopt.close()\nprint('steps', steps)\n"
    )
    ended = commands.done("run", "-n", "2", program(tmp_path, text.replace("SHARD", line))[1])
    assert sorted(ended.stdout.splitlines()) == [f"[{rank}] steps {steps}" for rank in range(2)]
    assert ended.stderr.count("a DataLoader shuffles all 64 samples") == times
