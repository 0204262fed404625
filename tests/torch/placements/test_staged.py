"""Optimizers of models on GPUs, without a GPU: staged on CPU tensors, and on the device whose memory is the host's.

Both must give the bits of DistributedOptimizer itself. What only a GPU can show, `fastps gpu-check` checks.
"""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.device.placement import gpus_of_workers, placement
from fastps.device.store import DeviceStore
from fastps.kernels.cuda import runtime as cuda
from fastps.lab.gpus.cuda_on_host import HostDevice, host_devices
from fastps.torch.placements.host import HostPlacement
from fastps.torch.placements.on_device import DevicePlacement
from fastps.torch.placements.staged import StagedPlacement
from fastps.torch.state import publish_weights
from fastps.torch.tensors import Tensors
from tests.device.test_device import first_weights, make_store
from tests.support import processes
from tests.support.torch_optimizers import OPTIMIZERS, one_worker, share_of
from tests.support.torch_optimizers import train_on as train


class HostDevicePlacement(DevicePlacement):
    """A DevicePlacement on host memory."""

    def make_device(self) -> CudaDevice:
        return HostDevice("host", 0.001)


class SeveralDevicesPlacement(DevicePlacement):
    """A DevicePlacement on a device of host memory for each GPU that FASTPS_GPUS names."""

    def make_device(self) -> CudaDevice:
        return HostDevice(f"gpu {gpus_of_workers()[fastps.rank()]}", 0.001)

    def server_devices(self) -> Callable[[], list[CudaDevice]]:
        return partial(host_devices, [f"gpu {gpu}" for gpu in dict.fromkeys(gpus_of_workers())], 0.001)  # type: ignore[arg-type]


def placed_by(placement: type[HostPlacement]) -> type[fastps.DistributedOptimizer]:
    """The optimizer for a model on the CPU whose placement is another one."""

    def place(self: Any, push_dtype: torch.dtype) -> HostPlacement:
        return placement(self._tensors, push_dtype)

    return type(placement.__name__, (fastps.DistributedOptimizer,), {"_place": place})


StagedOptimizer, HostDeviceOptimizer = placed_by(StagedPlacement), placed_by(HostDevicePlacement)
SeveralDevicesOptimizer = placed_by(SeveralDevicesPlacement)
Kind = type[fastps.DistributedOptimizer]
KINDS: dict[str, Kind] = {"staged": StagedOptimizer, "device": HostDeviceOptimizer}
EACH = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
BATCH = 8


def make_model(seed: int = 0) -> torch.nn.Module:
    """A convolution in channels_last among it: its strides are not those of its shape."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(16, 7), torch.nn.Linear(7, 3)
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def batches(steps: int, size: int = BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shapes = size, 3, 4, 4
    return [(torch.randn(*shapes, generator=generator), torch.randint(3, (size,), generator=generator)) for _ in range(steps)]


def flat(model: torch.nn.Module) -> list[float]:
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


def assert_same(
    kind: Kind,
    run: Callable[[Any, Any], Any],
    optimizer_of: Callable[[Any], torch.optim.Optimizer] = OPTIMIZERS["momentum"],
    make: Callable[[], torch.nn.Module] = make_model,
    moves: bool = True,
    **options: Any,
) -> None:
    """`run` returns the same, and ends with the same bits, under this kind and under the plain DistributedOptimizer."""
    found = []
    for each in (fastps.DistributedOptimizer, kind):
        with one_worker(make(), optimizer_of, named=True, kind=each, **options) as (model, optimizer):
            returned = run(model, optimizer)
        found.append((returned, flat(model)))
    assert found[0] == found[1]
    assert (found[0][1] != flat(make())) == moves


@pytest.mark.sampled(4)
@EACH
@pytest.mark.parametrize("name", ["nesterov", "adam", "rmsprop-all", "adamw-amsgrad", "nadam", "adadelta"])
def test_one_worker_has_the_bits_of_the_optimizer_on_the_cpu(kind: Kind, name: str) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> Any:
        train(model, optimizer, batches(15))
        with optimizer.averaged_weights():
            averaged = flat(model)
        assert averaged != flat(model)
        optimizer.average_buffers()
        state = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
        return averaged, [value.tolist() for value in state]

    assert_same(kind, run, OPTIMIZERS[name], sync="bsp,ema=0.9,clip=0.5")


@EACH
def test_gradients_of_every_kind_reach_the_fold(kind: Kind) -> None:
    """Accumulated, clipped after backward, set by hand, missing, zeroed to zeros, and under a closure."""

    def run(model: torch.nn.Module, optimizer: Any) -> None:
        steps = batches(12)
        for number, (inputs, labels) in enumerate(steps):
            optimizer.zero_grad(set_to_none=number % 3 != 0)
            for part in (slice(0, 4), slice(4, 8)):
                torch.nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            parameters = list(model.parameters())
            if number == 5:
                parameters[0].grad = torch.ones_like(parameters[0])
            if number == 7:
                parameters[1].grad = None
            optimizer.step()
        inputs, labels = steps[0]

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0

    assert_same(kind, run)


@pytest.mark.sampled(4)
@EACH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_in_half_precision_have_the_bits_of_the_cpu(kind: Kind, dtype: torch.dtype) -> None:
    assert_same(kind, lambda model, optimizer: train(model, optimizer, batches(10)), sync="bsp,clip=0.5", push_dtype=dtype)


@EACH
def test_a_grad_scaler_skips_steps_with_infinities_and_undoes_its_scale(kind: Kind) -> None:
    def run(model: torch.nn.Module, optimizer: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number, (inputs, labels) in enumerate(batches(8)):
            optimizer.zero_grad()
            scaler.scale(torch.nn.functional.cross_entropy(model(inputs), labels)).backward()
            if number == 3:
                next(model.parameters()).grad[0, 0, 0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.version == 8

    assert_same(kind, run)


@EACH
def test_a_state_dict_is_loaded_and_the_run_goes_on_from_it(kind: Kind) -> None:
    model = make_model()
    plain = OPTIMIZERS["adam"](model.parameters())
    train(model, plain, batches(5))
    state = plain.state_dict()

    def run(mine: torch.nn.Module, optimizer: Any) -> None:
        optimizer.load_state_dict(state)
        train(mine, optimizer, batches(5))

    assert_same(kind, run, OPTIMIZERS["adam"], lambda: copy.deepcopy(model))


def test_weights_are_replaced_behind_the_folds_that_are_queued() -> None:
    update = fastps.SGD(lr=1.0, momentum=0.5)
    expected = {name: values - 1.0 for name, values in first_weights().items()}
    with make_store(update, "asp", 1, (0,)) as store:
        assert isinstance(store, DeviceStore)
        with store.use(HostDevice("host", 0.1)).attach(0) as worker:
            for view in worker.gradients.values():
                view[:] = 1.0
            worker.push([update.hyper])  # folds it, and queues the kernel, which runs 0.1 s later
            tensors = Tensors([torch.from_numpy(each) for each in first_weights().values()], DevicePlacement.over).enter(store)
            publish_weights(worker, tensors, lambda newest: newest)
            worker.pull()
            assert {name: values.tolist() for name, values in worker.weights.items()} == {
                name: values.tolist() for name, values in expected.items()
            }
            assert store.plane_views(store.committed()[1], 0)[0].tolist() == [1.0] * store.layout.parameters[0].length


def run_ranks(classes: list[Kind], sync: str, begun: int = 0, **options: Any) -> Any:
    """Train with a worker a class, each on its share of the batches; returns what each ended with. `begun`: a version."""
    workers = len(classes)
    steps = batches(20, workers * BATCH)

    def work(rank: int) -> list[float]:
        model = make_model(seed=rank)
        inner = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        with classes[rank](inner, sync=sync, model=model, **options) as optimizer:
            optimizer.wait_for_start()  # under asp one may have come to its end before the other has begun
            train(model, optimizer, share_of(steps, rank, BATCH))
            optimizer.wait_for_others()
            assert optimizer.version == begun + (20 if sync == "bsp" else 20 * workers)
            return flat(model)

    return processes.results(processes.start_job(work, workers), 60)


def test_on_a_device_backward_copies_no_gradient_and_step_copies_all_of_them_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, copied = make_model(seed=0), list[int]()
    copy = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, values: (copied.append(len(to)), copy(to, values)))
    with HostDeviceOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model=model) as optimizer:
        model(torch.ones(2, 3, 4, 4)).sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        assert copied == []
        optimizer.step()
        assert copied == [len(gradients)]
        assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))


@pytest.mark.sampled(2)
@EACH
def test_workers_of_a_job_end_with_the_bits_of_workers_on_the_cpu(kind: Kind) -> None:
    expected = run_ranks([fastps.DistributedOptimizer] * 2, "bsp")
    found = run_ranks([kind] * 2, "bsp")
    assert found == [expected[0]] * 2


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sync", ["bsp", "r2sp:0.8"])
def test_workers_on_several_gpus_end_with_the_bits_of_workers_on_the_cpu(sync: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3 workers on 2 GPUs. Under r2sp the one shard is on one GPU, and worker 1 sees a replica."""
    monkeypatch.setenv("FASTPS_GPUS", "0,1")
    expected = run_ranks([fastps.DistributedOptimizer] * 3, sync)
    found = run_ranks([SeveralDevicesOptimizer] * 3, sync)
    assert found[0] == found[1] == found[2]
    if sync == "bsp":
        assert found[0] == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("server", ["workers", "process"])
def test_a_job_on_several_gpus_writes_checkpoints_and_resumes(
    server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 3 workers on 2 GPUs, whose checkpoints a thread writes while they train. A job on the CPU has the same."""
    monkeypatch.setenv("FASTPS_GPUS", "0,1")
    monkeypatch.setenv("FASTPS_CHECKPOINT_EVERY", "15")
    found, saved, first = [], [], Path()
    for kind in (fastps.DistributedOptimizer, SeveralDevicesOptimizer):
        monkeypatch.setenv("FASTPS_SERVER", server if kind is SeveralDevicesOptimizer else "workers")
        found.append(run_ranks([kind] * 3, "bsp", checkpoint=tmp_path / kind.__name__))
        first, last = sorted((tmp_path / kind.__name__).iterdir())
        assert (fastps.load(first).version, fastps.load(last).version) == (15, 20)
        saved.append(fastps.load(last).tensors)
    assert found[0] == found[1]
    assert saved[0].keys() == saved[1].keys()
    assert all((saved[0][name] == saved[1][name]).all() for name in saved[0])
    resumed = []
    for kind in (fastps.DistributedOptimizer, SeveralDevicesOptimizer):
        monkeypatch.setenv("FASTPS_SERVER", server if kind is SeveralDevicesOptimizer else "workers")
        resumed.append(run_ranks([kind] * 3, "bsp", begun=15, resume=first))
    assert resumed[0] == resumed[1]


def test_the_server_sees_the_gpus_as_worker_0_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr("fastps.torch.placements.on_device.CudaDevice", made.append)
    placed = DevicePlacement([torch.zeros(3)])
    monkeypatch.setenv("WORLD_SIZE", "4")
    for gpus, expected in (("", [0]), ("2", [0]), ("2,0", [0, 1]), ("1,0,3,2", [0, 1, 2, 3])):
        monkeypatch.setenv("FASTPS_GPUS", gpus)
        made.clear()
        placed.server_devices()()
        assert made == expected


@EACH
def test_a_replacement_of_worker_0_looks_for_the_job_that_runs(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """It never begins a second job of that name."""
    monkeypatch.setenv("FASTPS_JOINS", "1")
    with pytest.raises(fastps.AttachError, match="no-such-job"):
        kind(torch.optim.SGD(make_model().parameters(), lr=0.1), job="no-such-job", rank=0, workers=2, timeout_s=0.1)


@pytest.mark.slow
def test_staged_and_plain_workers_train_together() -> None:
    """A mixed group: some workers on a GPU, some on the CPU."""
    expected = run_ranks([fastps.DistributedOptimizer] * 3, "bsp")
    mixed: list[Kind] = [StagedOptimizer, fastps.DistributedOptimizer, StagedOptimizer]
    assert run_ranks(mixed, "bsp") == expected


@pytest.mark.sampled(4)
@EACH
@pytest.mark.parametrize("sync", ["asp", "dssp:1,4"])
def test_asynchronous_workers_fold_every_push(kind: Kind, sync: str) -> None:
    found = run_ranks([kind] * 2, sync)
    assert found[0] == found[1]


def test_weights_that_are_written_behind_the_optimizers_back_are_refused_by_name() -> None:
    with one_worker(make_model(), named=True, kind=StagedOptimizer) as (model, optimizer):
        with torch.no_grad():
            next(model.parameters()).zero_()
        with pytest.raises(fastps.ParameterChangedError, match=r"0\.weight.*before wrapping"):
            train(model, optimizer, batches(1))


# -- who gets what ---------------------------------------------------------------------------------------------------------


def test_placement_follows_the_launchers_word_and_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert placement() == "host", "nobody said that the workers share a GPU"
    monkeypatch.setenv("FASTPS_PLACEMENT", "device")
    with pytest.raises(fastps.UsageError, match="found no word of the GPUs"):
        placement()
    monkeypatch.setenv("FASTPS_GPUS", "0,1")
    assert placement() == "device", "the user asked for it"
    monkeypatch.delenv("FASTPS_PLACEMENT")
    assert placement() == "host", "nobody has tried several GPUs"
    monkeypatch.setenv("FASTPS_PLACEMENT", "device")
    monkeypatch.setenv("FASTPS_GPUS", "1")
    assert placement() == "device"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert placement() == "device", "no memory of torch's allocator is shared"
    monkeypatch.setenv("FASTPS_PLACEMENT", "attic")
    with pytest.raises(fastps.UsageError, match="FASTPS_PLACEMENT to be one of auto, host, device, found 'attic'"):
        placement()


def test_asking_for_a_gpu_where_there_is_none_is_one_clear_sentence() -> None:
    with contextlib.suppress(cuda.CudaUnavailableError):
        cuda.load_cupy()
        pytest.skip("there is a GPU here")
    with pytest.raises(DeviceError, match=r"expected (CuPy|a GPU|at least one GPU).*found") as caught:
        CudaDevice(0)
    assert "\n" not in str(caught.value)
