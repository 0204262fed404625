"""init_process_group("fastps") in processes: torch's functions against NumPy, DDP and FSDP against gloo, faults, refusals."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fastps.collectives import process_group as of
from fastps.collectives.works import GroupWork, Sequencer
from fastps.errors import TimeoutExceededError, UnsupportedError, UsageError
from tests.support import processes
from tests.support.torch_optimizers import alone  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TIMEOUT = timedelta(seconds=30)


@contextlib.contextmanager
def _group(folder: Path, rank: int, size: int, backend: str = "fastps", timeout: timedelta = TIMEOUT) -> Iterator[None]:
    dist.init_process_group(backend, f"file://{folder}/{backend}", timeout=timeout, world_size=size, rank=rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _start(folder: Path, size: int, member: Callable[[int], Any], **options: Any) -> list[processes.Child]:
    def live(rank: int) -> Any:
        with _group(folder, rank, size, **options):
            return member(rank)

    return processes.start_each(live, size)


def _run(folder: Path, size: int, member: Callable[[int], Any], **options: Any) -> list[Any]:
    return processes.results(_start(folder, size, member, **options), 60)


def _errors(folder: Path, size: int, member: Callable[[int], Any], **options: Any) -> list[Any]:
    children = _start(folder, size, member, **options)
    processes.finish(children, 60)
    return [child.outcome for child in children]


def _await_rank_0() -> None:
    """Wait until rank 0 has begun a collective."""
    processes.wait_until(lambda: dist.distributed_c10d._get_default_group()._group._exchange.state_of(0)[0], 60)


# -- torch's functions


def _use_all_functions(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8):
        for length in (1, 1000, 100_000):
            tensor = torch.full((length,), rank + 1, dtype=dtype)
            dist.all_reduce(tensor)
            assert (tensor == size * (size + 1) // 2).all()
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    assert tensor.tolist() == [(size - 1) / 2] * 3
    tensor = torch.tensor([rank == 0, rank >= 0])
    dist.all_reduce(tensor, op=dist.ReduceOp.MIN)
    assert tensor.tolist() == [False, True]
    works = [dist.all_reduce(torch.full((50_000,), float(number)), async_op=True) for number in range(5)]
    for number, work in enumerate(works):
        assert work.wait() and work.is_completed() and (work.result()[0] == number * size).all()
    assert (dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()[0] == size).all()
    tensor = torch.arange(12.0).reshape(3, 4).t() + rank  # not contiguous
    dist.broadcast(tensor, src=1)
    assert torch.equal(tensor, torch.arange(12.0).reshape(3, 4).t() + 1)
    dist.reduce(tensor, dst=0)
    outs = [torch.empty(2, dtype=torch.int32) for _ in range(size)]
    dist.all_gather(outs, torch.full((2,), rank, dtype=torch.int32))
    assert [out.tolist() for out in outs] == [[other, other] for other in range(size)]
    out = torch.empty(2 * size)
    dist.all_gather_into_tensor(out, torch.full((2,), float(rank)))
    assert out.tolist() == [float(other) for other in range(size) for _ in range(2)]
    part = torch.empty(2)
    dist.reduce_scatter_tensor(part, out.clone())
    assert part.tolist() == [float(rank * size)] * 2
    dist.reduce_scatter(part, [torch.full((2,), float(other)) for other in range(size)])
    assert part.tolist() == [float(rank * size)] * 2
    outs = [torch.empty(2) for _ in range(size)]
    dist.gather(torch.full((2,), float(rank)), outs if rank == 0 else None, dst=0)
    assert rank or [out[0].item() for out in outs] == [float(other) for other in range(size)]
    outs = [torch.full((2,), float(rank)), *(torch.empty(2) for _ in range(size - 1))]
    dist.all_gather(outs, outs[0])  # another rank's output is this one's input
    assert [out[0].item() for out in outs] == [float(other) for other in range(size)]
    dist.scatter(part, [torch.full((2,), float(10 * other)) for other in range(size)] if rank == 1 else None, src=1)
    assert part.tolist() == [10.0 * rank] * 2
    dist.all_to_all_single(out := torch.empty(size), torch.arange(float(size)) + 10 * rank)
    assert out.tolist() == [10.0 * other + rank for other in range(size)]
    dist.barrier()


def _use_objects_and_groups(rank: int, size: int) -> None:
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    objects = [rank, "of rank"]
    dist.broadcast_object_list(objects, src=1)
    assert objects[0] == 1
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, dst=0)
    assert rank or gathered == list(range(size))
    pair = dist.new_group([0, 1])
    if rank < 2:
        tensor = torch.tensor([rank, 7])
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=pair)
        assert tensor.tolist() == [1, 7]
        dist.destroy_process_group(pair)
    with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
        coalesced = [torch.ones(3), torch.ones(400)]
        for tensor in coalesced:
            dist.all_reduce(tensor)
    manager.wait()
    assert all((tensor == size).all() for tensor in coalesced)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_torchs_functions(tmp_path: Path, size: int) -> None:
    def member(rank: int) -> None:
        assert dist.get_backend() == "fastps" and dist.get_rank() == rank and dist.get_world_size() == size
        _use_all_functions(rank, size)
        _use_objects_and_groups(rank, size)

    _run(tmp_path, size, member)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_gathers_in_one_call_agree_with_gloo(tmp_path: Path, count: int) -> None:
    def member(rank: int) -> None:
        gloo = dist.new_group(backend="gloo")
        own = [torch.full((2 + number,), 10.0 * rank + number) for number in range(count)]
        found, wanted = ([[torch.zeros(2 + number) for number in range(count)] for _ in range(3)] for _ in range(2))
        for outputs, group in ((found, None), (wanted, gloo)):
            dist.all_gather_coalesced(outputs, own, group=group)
        assert [[each.tolist() for each in of_rank] for of_rank in found] == [
            [each.tolist() for each in of_rank] for of_rank in wanted
        ]
        with dist._coalescing_manager(async_ops=True) as manager:  # type: ignore[attr-defined]
            gathered = [torch.zeros(3 * each.numel()) for each in own]
            for out, each in zip(gathered, own, strict=True):
                dist.all_gather_into_tensor(out, each)
        manager.wait()
        assert [out.tolist() for out in gathered] == [
            torch.cat([of_rank[number] for of_rank in wanted]).tolist() for number in range(count)
        ]

    _run(tmp_path, 3, member)


def test_a_group_is_made_again_under_the_name_of_one_that_was_destroyed(tmp_path: Path) -> None:
    def member(rank: int) -> list[float]:
        sums = []
        for _ in range(3):
            group = dist.new_group([0, 1], use_local_synchronization=True)  # which names a group by its ranks
            dist.all_reduce(tensor := torch.ones(1) + rank, group=group)
            dist.destroy_process_group(group)
            sums.append(tensor.item())
        return sums

    assert _run(tmp_path, 2, member) == [[3.0, 3.0, 3.0]] * 2


def test_a_group_is_made_again_with_more_ranks(tmp_path: Path) -> None:
    """Torch gives both the same name after all groups were destroyed. Rank 2 was not in the first."""

    def member(rank: int) -> list[float]:
        store, sums = dist.FileStore(str(tmp_path / "store"), 3), []
        for ranks in ([0, 1], [0, 1, 2]):
            dist.init_process_group("fastps", store=store, rank=rank, world_size=3, timeout=TIMEOUT)
            group = dist.new_group(ranks)
            if rank in ranks:
                dist.all_reduce(tensor := torch.ones(1) + rank, group=group)
                sums.append(tensor.item())
            dist.barrier()
            dist.destroy_process_group()
        return sums

    assert processes.results(processes.start_each(member, 3), 60) == [[3.0, 6.0], [3.0, 6.0], [6.0]]


def test_one_process_is_a_group(tmp_path: Path) -> None:
    def member(rank: int) -> list[float]:
        dist.all_reduce(tensor := torch.ones(3))
        dist.all_gather([out := torch.zeros(3)], tensor)
        return out.tolist()

    assert _run(tmp_path, 1, member) == [[1.0, 1.0, 1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_a_thousand_random_collectives_agree_with_gloo(tmp_path: Path, size: int) -> None:
    """The reference is gloo in the same processes; integers are equal, floats to a few units in the last place."""

    def member(rank: int) -> None:
        gloo = dist.new_group(backend="gloo")
        random = torch.Generator().manual_seed(5)
        for _ in range(1000):
            length = int(10 ** (5.2 * torch.rand((), generator=random).item()))
            choice, root = (int(torch.randint(most, (), generator=random)) for most in (4, size))
            dtype = (torch.float32, torch.int64, torch.float64)[int(torch.randint(3, (), generator=random))]
            own = (torch.randn(length, generator=random) * 100 + rank).to(dtype)
            found, wanted = own.clone(), own.clone()
            for tensor, group in ((found, None), (wanted, gloo)):
                if choice == 0:
                    dist.all_reduce(tensor, group=group)
                elif choice == 1:
                    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
                elif choice == 2:
                    dist.broadcast(tensor, src=root, group=group)
                else:
                    outs = [torch.empty_like(own) for _ in range(size)]
                    dist.all_gather(outs, own, group=group)
                    tensor.copy_(outs[root])
            torch.testing.assert_close(found, wanted, rtol=1e-5 if dtype == torch.float32 else 1e-12, atol=1e-3)

    _run(tmp_path, size, member)


# -- DDP and FSDP


def _trained(wrap: Callable[[torch.nn.Module], torch.nn.Module], parts: int, part: int) -> list[torch.Tensor]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs = torch.randn(10, 8, 20)
    for batch in inputs:
        mine = batch.chunk(parts)[part]
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(wrapped(mine), mine[:, :3]).backward()
        optimizer.step()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # a DTensor under fully_shard
        for p in model.parameters()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ddp_trains_as_with_gloo_and_as_one_process(tmp_path: Path, size: int) -> None:
    ddp = torch.nn.parallel.DistributedDataParallel

    def member(rank: int) -> list[Any]:
        return [each.numpy() for each in _trained(lambda m: ddp(m, bucket_cap_mb=0.01), size, rank)]

    found, wanted = _run(tmp_path, size, member), _run(tmp_path, size, member, backend="gloo")
    single_process = _trained(lambda model: model, 1, 0)
    for rank in range(size):
        for mine, first, theirs, single in zip(found[rank], found[0], wanted[0], single_process, strict=True):
            assert (mine == first).all()
            torch.testing.assert_close(torch.from_numpy(mine), torch.from_numpy(theirs), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(torch.from_numpy(mine), single, rtol=1e-5, atol=1e-5)
            assert size > 2 or (mine == theirs).all()  # two terms have one sum


def _reduced_by_callbacks(rank: int) -> list[float]:
    """Collectives that callbacks make and wait for, while others are pending; of a collective that runs here, too."""

    def twice_more(future: Any) -> torch.Tensor:
        once = dist.all_reduce(future.value()[0] * 2, async_op=True).get_future().wait()[0]
        dist.all_reduce(once)
        return once

    futures, works = [], []
    for number in range(4):
        works.append(dist.all_reduce(torch.full((2,), float(number)), async_op=True))
        futures.append(works[-1].get_future().then(twice_more))
    others = [dist.all_reduce(torch.full((3,), float(number)), async_op=True) for number in range(4)]
    found = [float(future.wait()[0]) for future in futures]
    late = works[1].get_future().then(twice_more)
    found += [float(late.wait()[0]), *(float(work.get_future().wait()[0][0]) for work in others)]
    return found


def test_callbacks_of_futures_make_collectives_and_wait_for_them(tmp_path: Path) -> None:
    expected = [16.0 * number for number in range(4)] + [16.0] + [2.0 * number for number in range(4)]
    assert _run(tmp_path, 2, _reduced_by_callbacks) == [expected] * 2


def _train_compressed(rank: int) -> list[float]:
    """DDP whose communication hook makes collectives in its futures' callbacks."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 20))
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=0.5)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        ddp(torch.full((4, 30), 0.1 * (step + rank))).square().mean().backward()
        optimizer.step()
    return [float(each.detach().double().sum()) for each in model.parameters()]


def test_torchs_power_sgd_hook_trains_as_with_gloo(tmp_path: Path) -> None:
    gloo = _run(tmp_path, 2, _train_compressed, backend="gloo")
    found = _run(tmp_path, 2, _train_compressed)
    assert found[0] == found[1] == pytest.approx(gloo[0], rel=1e-5)


def test_fully_shard_trains_as_one_process(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    def member(rank: int) -> list[Any]:
        mesh = dist.init_device_mesh("cpu", (2,))

        def wrap(model: torch.nn.Module) -> torch.nn.Module:
            for layer in model:  # type: ignore[attr-defined]
                fully_shard(layer, mesh=mesh)
            return fully_shard(model, mesh=mesh)  # type: ignore[return-value]

        return [each.numpy() for each in _trained(wrap, 2, rank)]

    found, single_process = _run(tmp_path, 2, member), _trained(lambda model: model, 1, 0)
    for mine, single in zip(found[0], single_process, strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), single, rtol=1e-5, atol=1e-5)


# -- faults


def _reduce_forever(rank: int) -> None:
    while True:
        dist.all_reduce(torch.ones(100_000))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_by_name(tmp_path: Path, size: int) -> None:
    begun = tmp_path / "begun"

    def member(rank: int) -> None:
        dist.barrier()
        begun.touch()
        _reduce_forever(rank)

    children = _start(tmp_path, size, member)
    processes.wait_until(begun.exists, 60)
    os.kill(children[1].process_id, signal.SIGKILL)
    processes.finish_after_a_death([child for rank, child in enumerate(children) if rank != 1], "rank 1 (")
    processes.finish([children[1]], 10)


def test_a_rank_that_raises_ends_the_others_by_its_reason(tmp_path: Path) -> None:
    def member(rank: int) -> None:
        if rank == 1:
            dist.distributed_c10d._get_default_group()._group.fail("ValueError: out of cheese")  # as at exit
            raise ValueError("out of cheese")
        _reduce_forever(rank)

    first, second = _errors(tmp_path, 2, member)
    assert first[0] == "WorkerDiedError" and "rank 1 failed" in first[1] and "out of cheese" in first[1]
    assert second[0] == "ValueError"


def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    def member(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(3))

    first, second = _errors(tmp_path, 2, member)
    assert first[0] == "WorkerDiedError" and "rank 1 has left the process group" in first[1]
    assert second is None


@pytest.mark.parametrize("differ", [
    lambda: dist.all_reduce(torch.ones(4)),
    lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64)),
    lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX),
    lambda: dist.barrier(),
])  # fmt: skip
def test_ranks_in_different_collectives_are_named(tmp_path: Path, differ: Callable[[], Any]) -> None:
    def member(rank: int) -> None:
        dist.all_reduce(torch.ones(3)) if rank else differ()

    found = _errors(tmp_path, 2, member)
    assert any(error[0] == "UsageError" and "are in different collectives" in error[1] for error in found), found
    assert all(error[0] in ("UsageError", "WorkerDiedError") for error in found), found


def test_the_timeout_names_the_rank_that_is_missing(tmp_path: Path) -> None:
    def member(rank: int) -> float:
        began = time.monotonic()
        if rank == 0:
            with pytest.raises(TimeoutExceededError, match=r"timed out after 0\.3 s: expected rank 1 .* has not begun it"):
                dist.all_reduce(torch.ones(3))
            with pytest.raises(UsageError, match="the process group is broken"):
                dist.all_reduce(torch.ones(3))
            return time.monotonic() - began
        _await_rank_0()
        return 0.0

    assert 0.3 <= _run(tmp_path, 2, member, timeout=timedelta(seconds=0.3))[0] < 5


def test_ctrl_c_ends_a_wait_and_the_other_rank(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def member(rank: int) -> None:
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            begun.touch()
            dist.all_reduce(torch.ones(100_000))
        _await_rank_0()
        _reduce_forever(rank)  # the first has all it needs

    children = _start(tmp_path, 2, member)
    processes.wait_until(begun.exists, 60)
    time.sleep(0.1)
    os.kill(children[0].process_id, signal.SIGINT)
    processes.finish(children, 20)
    assert children[0].outcome[0] == "KeyboardInterrupt"
    assert children[1].outcome[0] == "WorkerDiedError", children[1].outcome
    assert "KeyboardInterrupt" in children[1].outcome[1]


def test_an_error_of_an_asynchronous_collective_is_raised_by_its_wait_and_its_future(tmp_path: Path) -> None:
    def member(rank: int) -> None:
        if rank == 0:
            work = dist.all_reduce(torch.ones(3), async_op=True)
            with pytest.raises(RuntimeError, match="rank 1 has left"):
                work.get_future().wait()
            with pytest.raises(Exception, match="rank 1 has left"):
                work.wait()
            assert work.is_completed() and not work.is_success() and work.exception() is not None

    _run(tmp_path, 2, member)


# -- what it does not take


def test_tensors_that_it_does_not_take_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="dense tensors of the CPU, found one that is sparse"):
        of.check(torch.eye(2).to_sparse(), "all_reduce")
    with pytest.raises(UnsupportedError, match="found one that is on meta"):
        of.check(torch.empty(2, device="meta"), "all_reduce")
    with pytest.raises(UnsupportedError, match=r"does not reduce torch\.int32 by RedOpType\.AVG"):
        of.reduction_of(dist.ReduceOp.AVG, torch.int32, "all_reduce")
    with pytest.raises(UnsupportedError, match=r"does not reduce torch\.complex64"):
        of.reduction_of(dist.ReduceOp.SUM, torch.complex64, "all_reduce")
    assert of.moved_element(torch.complex64, "broadcast") != of.moved_element(torch.float32, "broadcast")


def test_send_and_receive_are_refused(tmp_path: Path) -> None:
    def member(rank: int) -> None:
        with pytest.raises(UnsupportedError, match="use a group of gloo"):
            dist.send(torch.ones(1), 1 - rank)
        dist.barrier()

    _run(tmp_path, 2, member)


def test_works_run_in_order_and_closing_waits_for_them() -> None:
    ran: list[int] = []
    sequencer = Sequencer("test")
    works = [sequencer.give(GroupWork([number]), [partial(ran.append, number)], at_once=number % 3 == 0) for number in range(9)]
    sequencer.drain()
    assert ran == list(range(9)) and all(work.is_success() for work in works)
    with pytest.raises(UsageError, match="was destroyed"):
        sequencer.give(GroupWork([]), [], at_once=True)


def _scatter_or_gather(rank: int, size: int) -> None:
    if rank == 0:
        dist.scatter(torch.ones(3), [torch.ones(3) for _ in range(size)], src=0)
    else:
        dist.gather(torch.ones(3), dst=0)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("differ", {
    "root": lambda rank, size: dist.broadcast(torch.ones(3), src=rank),
    "size": lambda rank, size: dist.broadcast(torch.ones(3 + rank), src=rank),
    "type": lambda rank, size: dist.broadcast(torch.ones(4, dtype=[torch.float32, torch.int64, torch.float64][rank]), src=rank),
    "broadcast or reduce": lambda rank, size: (dist.reduce if rank else dist.broadcast)(torch.ones(3), 0),
    "scatter or gather": _scatter_or_gather,
    "nobody's root": lambda rank, size: dist.reduce(torch.ones(3), dst=(rank + 1) % size),
    "objects": lambda rank, size: dist.broadcast_object_list([f"of {rank}"], src=rank),
}.items(), ids=lambda pair: pair[0])  # fmt: skip
@pytest.mark.sampled(3)
def test_ranks_that_wait_for_nobodys_data_find_out_that_they_differ(
    tmp_path: Path, size: int, differ: tuple[str, Callable[[int, int], Any]]
) -> None:
    for error in _errors(tmp_path, size, lambda rank: differ[1](rank, size)):
        assert error is not None and error[0] == "UsageError" and "are in different collectives" in error[1], error
