"""What `fastps gpu-check` checks, part by part; it runs each part as `python -m fastps.bench.gpu.check NAME SETTINGS FILE`.

Parts check each kernel against double precision, the kernels' bandwidth, processes on one GPU through CUDA IPC against the
CPU path, training on real images, and a step beside other ways to synchronize. With several GPUs they check each pair's peer
access and bandwidth, folds over peers, jobs on all GPUs against the CPU path, and that the others go on after a worker's death.
A check that cannot run counts as failed and has a row with its reason.
"""

import faulthandler
import functools
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fastps.bench.gpu import exact, kernels_cuda, step_cuda
from fastps.bench.gpu.device_fold import DeviceFold
from fastps.bench.gpu.peers import check_folds, check_pairs, devices_of
from fastps.bench.gpu.run import Settings
from fastps.bench.gpu.worker import GRADIENT, LEARNING_RATE, GpuJob, first_weights, save
from fastps.bench.measure import BenchOptions, Row
from fastps.device.arena import FiniteCheck
from fastps.device.cuda import CudaDevice
from fastps.device.placement import VARIABLE_OF_SAME_GPU
from fastps.errors import Error
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, UPDATE_RULES, examples
from fastps.kernels.cuda import launch_args
from fastps.kernels.update import fold
from fastps.lab.demo.data import load
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions

SIZES = (1, 3, 15, 17, 1023, 4095, 4096, 4097, 100_003)
TOLERANCE = 2e-5  # of a weight after one fold in single precision, relative to the greatest
SHARE = 0.85  # of the copy's bandwidth, for SGD with momentum and Adam in single precision
EQUAL = 1e-5  # greatest difference of weights over the greatest weight, GPU against CPU path
LEAST_ACCURACY = 0.85
CASES = (("bsp", "momentum"), ("bsp", "adam"), ("dssp:1,4", "sgd"), ("asp", "sgd"))  # sync and optimizer of a two-process job

UPDATES = examples()  # by name
WORKER = (sys.executable, "-m", "fastps.bench.gpu.worker")  # and a file of jobs


# -- kernels -----------------------------------------------------------------------------------------------------------------


def check_kernels(device: CudaDevice, sizes: Sequence[int] = SIZES) -> Iterator[Row]:
    """A row for each rule, gradient dtype and mode: the greatest relative difference from double precision."""
    for name in UPDATES:
        for dtype in launch_args.DTYPES:
            for mode in (fold.FOLD_SUM, fold.FOLD_EACH):
                yield _kernel_row(device, name, dtype, mode, sizes)


def _kernel_row(device: CudaDevice, name: str, dtype: str, mode: int, sizes: Sequence[int]) -> Row:
    rule, hyper = UPDATES[name].rule, UPDATES[name].hyper
    planes = len(rule.planes)
    text = f"{name}-{dtype}-{'sum' if mode == fold.FOLD_SUM else 'each'}"
    differences, told = [], True
    for count, size in enumerate(sizes):
        random = np.random.default_rng([count, size])
        pushes, ema_decay = 1 + count % 4, 0.9 if count % 2 else 0.0
        weights = random.standard_normal(size, np.float32)
        state = random.standard_normal((planes + (ema_decay > 0), size), np.float32)
        most = (state**2).max(axis=0, initial=0.0)
        for plane in [rule.planes.index(square) for square in UPDATE_RULES[rule.name].squares if square in rule.planes]:
            state[plane] = np.abs(state[plane]) + 16 + most  # a mean square exceeds the square of the mean
        raw = [_raw(random, size, dtype) for _ in range(pushes)]
        scales = [1.0 + index for index in range(pushes)]
        shape = launch_args.Shape(rule.number, len(state), ema_decay, ((0, size, 0),))
        made = [(gradient, [hyper], [True], scale, 1.0) for gradient, scale in zip(raw, scales, strict=True)]
        scale = 1.0 / pushes if mode == fold.FOLD_SUM else 1.0
        folded = DeviceFold(device, shape, mode, made, weights, state, np.full(1, 5, np.int64), dtype, scale=scale)
        try:
            folded.run()
            found_weights, found_state, _ = folded.results()
            told &= not folded.nonfinite()
        finally:
            folded.close()
        widened = [(_widened(gradient, dtype), hyper, own) for gradient, own in zip(raw, scales, strict=True)]
        expected = exact.fold_of(rule.number, mode, widened, weights, state, 5, scale, ema_decay)
        if not all(np.isfinite(each).all() for each in expected):
            reason = f"the check's own reference of {size} is not finite"
            return {"check": "kernels", "name": text, "ok": False, "missing": reason}
        differences += [_difference(found_weights, expected[0]), _difference(found_state, expected[1])]
    worst = max(differences)
    return {
        "check": "kernels",
        "name": text,
        "difference": worst,
        "tolerance": TOLERANCE,
        "ok": bool(worst <= TOLERANCE and told),
    }


def check_nonfinite(device: CudaDevice) -> list[Row]:
    """Check that the fold flags non-finite results, and the check of slots the parameter with such a value, at any place."""
    hyper = UPDATES["sgd"].hyper
    right = []
    for dtype in launch_args.DTYPES:
        layout = Layout(place([("a", (8,), (1,), 0), ("b", (5001,), (1,), 0)]), 1, SGD(lr=0.1).rule, parse_policy("bsp"), 1)
        check = FiniteCheck(device, replace(layout, gradient_type=dtype))  # type: ignore[arg-type]
        slot, stream = device.allocate(4 * layout.buffer_floats), device.make_stream()
        staged = device.host_memory(launch_args.DTYPE_BYTES[dtype] * 5001)
        for at in (0, 4095, 4096, 5000):
            raw = [_raw(np.random.default_rng(at), 5001, dtype) for _ in range(3)]
            raw[1][at] = {"float32": np.inf, "float16": np.nan, "bfloat16": 0x7F80}[dtype]
            shape = launch_args.Shape(fold.RULE_SGD, 0, 0.0, ((0, 5001, 0),))
            weights, state = np.ones(5001, np.float32), np.zeros((0, 5001), np.float32)
            pushes = [(gradient, [hyper], [True], 1.0, 1.0) for gradient in raw]
            made = DeviceFold(device, shape, fold.FOLD_SUM, pushes, weights, state, np.zeros(1, np.int64), dtype)
            made.run()
            right.append(made.nonfinite())
            made.close()
            for gradient, expected in ((raw[1], [False, True]), (raw[0], [False, False])):
                staged[:] = gradient.view(np.uint8)
                begin = slot + gradient.itemsize * layout.parameters[1].offset
                device.copy(begin, staged.ctypes.data, staged.nbytes, stream)
                check.queue(slot, stream)
                device.synchronize(stream)
                right.append(check.found().tolist() == expected)
        device.close(slot)
    return [{"check": "kernels", "name": "nonfinite", "ok": all(right)}]


def _raw(random: np.random.Generator, size: int, dtype: str) -> Any:
    values = random.standard_normal(size, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values if dtype == "float32" else values.astype(np.float16)


def _widened(values: Any, dtype: str) -> Any:
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values.astype(np.float32)


def _difference(found: Any, expected: Any) -> float:
    """Return the greatest absolute difference over the greatest value; 0 for empty arrays, infinity for NaN."""
    if not expected.size:
        return 0.0
    difference = float(np.abs(found - expected).max() / max(1.0, float(np.abs(expected).max())))
    return difference if np.isfinite(difference) else float("inf")


# -- speed -------------------------------------------------------------------------------------------------------------------


def check_bandwidth(device: CudaDevice, settings: Settings) -> list[Row]:
    """Run `fastps bench kernels --backend cuda` at one size; SGD with momentum and Adam must reach SHARE of a copy.

    What is small lies in the GPU's cache, and its figures are not judged.
    """
    repeats, repeat_s = (3, 0.02) if settings.quick else (5, 0.1)
    rows = kernels_cuda.rows_on(device, BenchOptions(parameters=(settings.parameters,), repeats=repeats, repeat_s=repeat_s))
    for row in rows:
        row["check"] = "bandwidth"
        row["bound"] = SHARE if row["name"] in ("sgd-momentum", "adam") and not settings.quick else None
        row["ok"] = row["bound"] is None or row["limit_share"] >= row["bound"]
    return rows


# -- whole jobs --------------------------------------------------------------------------------------------------------------


def run_jobs(
    jobs: Sequence[GpuJob], workers: int, placement: str, *, gpus: int = 1, server: str = "workers"
) -> list[list[dict[str, Any]]]:
    """Run jobs in the same workers, on the first `gpus` GPUs if they use one, and return what each wrote, by job.

    Under FASTPS_SAME_GPU=1 there are `gpus` devices on the first GPU.

    A job with a death goes on without that worker, which writes nothing; it is alone. Raises Error if a worker failed.
    """
    names = ("FASTPS_GPUS", "FASTPS_PLACEMENT", "FASTPS_SERVER")
    kept = {name: os.environ.get(name) for name in names}
    device, dies = jobs[0].device, any(job.dies_at for job in jobs)
    with tempfile.TemporaryDirectory(prefix="fastps-gpu-check-") as folder:
        path = Path(folder) / "jobs.json"
        save(jobs, path)
        try:
            os.environ.pop("FASTPS_GPUS", None)
            if device != "cpu":
                is_one = os.environ.get(VARIABLE_OF_SAME_GPU) == "1"
                os.environ["FASTPS_GPUS"] = ",".join("0" if is_one else str(gpu) for gpu in range(gpus))
            os.environ.update(FASTPS_PLACEMENT=placement, FASTPS_SERVER=server)
            options = JobOptions(on_worker_loss="continue") if dies else JobOptions()
            outcome = Launcher([*WORKER, str(path)], workers, options=options).run()
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        if outcome.first_failure is not None:
            failed, ended = outcome.first_failure, len(list(path.parent.glob("*-0.npz")))
            of = jobs[min(ended, len(jobs) - 1)]
            raise Error(f"worker {failed.rank} of {of}: {failed.ending}: {' '.join(list(failed.errors.tail)[-2:])}")
        ranks = [rank for rank in range(workers) if not (dies and rank == 1)]
        return [[dict(np.load(path.with_name(f"{number}-{rank}.npz"))) for rank in ranks] for number in range(len(jobs))]


@functools.cache
def _on_cpu(cases: tuple[tuple[str, str], ...], workers: int) -> list[list[dict[str, Any]]]:
    """What jobs on the CPU path end with; several checks of a part compare with it."""
    return run_jobs([GpuJob("cpu", sync, optimizer) for sync, optimizer in cases], workers, "host")


def check_processes(
    device: str, placement: str, *, workers: int = 2, gpus: int = 1, server: str = "workers", check: str, quick: bool = False
) -> Iterator[Row]:
    """Compare processes on GPUs, at least one a GPU, with as many on the CPU: bsp with momentum and Adam, dssp and asp."""
    workers, cases, suffix = max(workers, gpus), CASES[: 2 if quick else None], "-server" if server == "process" else ""
    names = [f"{sync}-{optimizer}-{placement}{suffix}" for sync, optimizer in cases]
    try:
        expected = _on_cpu(cases, workers)
        jobs = [GpuJob(device, sync, optimizer) for sync, optimizer in cases]
        found = run_jobs(jobs, workers, placement, gpus=gpus, server=server)
    except Error as error:
        yield from ({"check": check, "name": name, "ok": False, "missing": str(error)} for name in names)
        return
    for name, ours, theirs in zip(names, found, expected, strict=True):
        worst = max(_difference(each["weights"], theirs[0]["weights"]) for each in ours)
        versions = {int(each["version"]) for each in (*theirs, *ours)}
        yield {
            "check": check,
            "name": name,
            "gpus": gpus,
            "placements": sorted({str(each["kind"]) for each in ours}),
            "difference": worst,
            "tolerance": EQUAL,
            "ok": bool(worst <= EQUAL and len(versions) == 1),
        }


def check_going_on(device: str, placement: str, gpus: int = 1) -> Iterator[Row]:
    """Kill one of the workers of a job with a server: the others end, and every push that was posted is folded once."""
    workers = max(3, gpus)
    for sync in ("bsp", "asp"):
        name = f"{sync}-{placement}-{gpus}-gpus"
        try:
            job = GpuJob(device, sync, constant=True, dies_at=7)
            [found] = run_jobs([job], workers, placement, gpus=gpus, server="process")
        except Error as error:
            yield {"check": "faults", "name": name, "ok": False, "missing": str(error)}
            continue
        versions = {int(each["version"]) for each in found}
        first = np.concatenate([values.flatten().numpy() for values in first_weights()])
        expected = first - LEARNING_RATE * GRADIENT * max(versions)
        worst = max(_difference(each["weights"], expected) for each in found)
        posted = (workers - 1) * job.steps + job.dies_at
        is_right = versions == {job.steps if sync == "bsp" else posted} and worst <= EQUAL
        yield {
            "check": "faults",
            "name": name,
            "gpus": gpus,
            "placements": sorted({str(each["kind"]) for each in found}),
            "version": max(versions),
            "difference": worst,
            "tolerance": EQUAL,
            "ok": bool(is_right),
        }


def check_training(device: str, placement: str, data: str, epochs: int = 3) -> Iterator[Row]:
    """Train a small network on images with two workers on one GPU; also with autocast and a GradScaler."""
    names = [f"{data}{amp}-{placement}" for amp in ("", "-amp")]
    try:
        load(data)
        jobs = [GpuJob(device, "bsp", data=data, epochs=epochs, scaler=scaler) for scaler in (False, True)]
        found = run_jobs(jobs, 2, placement)
    except Error as error:
        yield from ({"check": "training", "name": name, "ok": False, "missing": str(error)} for name in names)
        return
    for name, ours in zip(names, found, strict=True):
        yield {
            "check": "training",
            "name": name,
            "placements": sorted({str(each["kind"]) for each in ours}),
            "accuracy": float(ours[0]["accuracy"]),
            "bound": LEAST_ACCURACY,
            "steps_per_s": float(sum(each["steps"] for each in ours) / ours[0]["seconds"]),
            "ok": bool(ours[0]["accuracy"] >= LEAST_ACCURACY),
        }


# -- the parts -----------------------------------------------------------------------------------------------------------------


def check_ipc() -> Iterator[Row]:
    """Whether another process reads memory of each GPU, as `fastps doctor` finds out."""
    from fastps.lab.measuring import doctor

    for found in doctor.gpu_findings():
        works = found.value != "no" and (found.name, found.value) != ("GPUs", 0)
        is_judged = found.name != "MPS"  # a job runs without it, too
        yield {"check": "IPC", "name": found.name, "ok": works if is_judged else None, "missing": found.shown}


def check_step(name: str, settings: Settings, nonfinite: str) -> Iterator[Row]:
    """Run `fastps bench step --device cuda` at one size, with the default, or with what lets folds overlap backward."""
    os.environ["FASTPS_NONFINITE"] = nonfinite
    size = 1_000_000 if settings.quick else 25_000_000
    options = BenchOptions(repeats=3, workers=(max(2, settings.gpus),), parameters=(size,), against=("limit", "nccl", "ddp"))
    for row in step_cuda.measure(options):
        named = f"{row['name']}-{row['sync']}-{row['workers']}-workers"
        yield {**row, "check": name, "name": named, "ok": None if "missing" in row else True}


def _in_both(check: Callable[..., Iterator[Row]], /, *arguments: Any, **more: Any) -> Iterator[Row]:
    """The rows of a check with the shards on the device, and with the shards in host memory."""
    for where in ("device", "host"):
        yield from check("cuda", where, *arguments, **more)


def _kernels(settings: Settings) -> Iterator[Row]:
    yield from _on_gpu(lambda device: check_kernels(device, SIZES[:: 3 if settings.quick else 1]))
    yield from _on_gpu(check_nonfinite)


def _under_sanitizer(settings: Settings) -> Iterator[Row]:
    for row in _on_gpu(lambda device: check_kernels(device, SIZES[:4])):
        yield {**row, "check": "compute-sanitizer"}


def _bandwidth(settings: Settings) -> Iterator[Row]:
    yield from _on_gpu(lambda device: check_bandwidth(device, settings))


CHECKS: dict[str, Callable[[Settings], Iterable[Row]]] = {
    "kernels": _kernels,
    "bandwidth": _bandwidth,
    "IPC": lambda settings: check_ipc(),
    "one process": lambda settings: _in_both(check_processes, workers=1, check="one process", quick=settings.quick),
    "two processes": lambda settings: _in_both(check_processes, check="two processes", quick=settings.quick),
    "peers": lambda settings: between_gpus(settings.gpus, settings.parameters),
    "several GPUs": lambda settings: on_several_gpus("cuda", settings),
    "several GPUs on one": lambda settings: on_one_gpu("cuda", settings),
    "faults": lambda settings: faults("cuda", settings.gpus),
    "training": lambda settings: _in_both(check_training, "mnist5k"),
    "step": lambda settings: check_step("step", settings, "reject"),
    "step with overlap": lambda settings: check_step("step with overlap", settings, "allow"),
    "compute-sanitizer": _under_sanitizer,
}


def between_gpus(
    count: int, parameters: int, devices: Callable[[int], list[Any]] = devices_of, repeat_s: float = 0.1
) -> Iterator[Row]:
    """The rows of peer access, bandwidth and folds over peers of `count` GPUs."""
    made = devices(count)
    try:
        yield from check_pairs(made, 4 * parameters, repeat_s)
        yield from check_folds(made, parameters, repeat_s)
    finally:
        for device in made:
            device.shut()


def on_several_gpus(device: str, settings: Settings) -> Iterator[Row]:
    """The rows of jobs with a worker on each GPU, without a server and with one."""
    for where, server in (("device", "workers"), ("device", "process"), ("host", "workers")):
        yield from check_processes(device, where, gpus=settings.gpus, server=server, check="several GPUs", quick=settings.quick)


def on_one_gpu(device: str, settings: Settings, count: int = 2) -> Iterator[Row]:
    """The rows of several GPUs, where one GPU is `count` devices: copies, folds over peers, jobs, and a death."""
    os.environ.update({VARIABLE_OF_SAME_GPU: "1", "FASTPS_GPUS": ",".join("0" * count)})
    parameters = 1_000_000  # so that all memory is there `count` times on any GPU
    for row in between_gpus(count, parameters):
        yield {**row, "check": "several GPUs on one", "name": f"{row['check']}: {row['name']}"}
    for row in itertools.chain(on_several_gpus(device, replace(settings, gpus=count)), check_going_on(device, "device", count)):
        yield {**row, "check": "several GPUs on one"}


def faults(device: str, count: int) -> Iterator[Row]:
    """The rows of deaths in jobs with a server, on one GPU and on all."""
    yield from check_going_on(device, "device")
    if count > 1:
        yield from check_going_on(device, "device", count)


def _on_gpu(check: Callable[[CudaDevice], Iterable[Row]]) -> Iterator[Row]:
    from fastps.device.cuda import CudaDevice

    device = CudaDevice()
    try:
        yield from check(device)
    finally:
        device.shut()


def main(arguments: Sequence[str]) -> None:
    """Run the part of this name with these settings, and append its rows to a file: `NAME SETTINGS FILE`."""
    name, settings, file = arguments
    faulthandler.enable()
    with Path(file).open("a", buffering=1) as rows:
        for row in CHECKS[name](Settings(**json.loads(settings))):
            rows.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
