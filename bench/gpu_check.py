"""Checks of everything in fastps that needs a GPU: `python -m fastps.bench.gpu_check`.

It checks each kernel against double precision, the kernels' bandwidth, two processes on one GPU through CUDA IPC against the
CPU path, and training on real images. With several GPUs it checks each pair's peer access and bandwidth, folds over peers, jobs
on all GPUs against the CPU path, and that the others go on after a worker's death. Figures go to bench/results/, with the
machine and the date. A check that cannot run counts as failed and has a row with its reason; one that needs more GPUs than the
machine has is named as not run.

Exit codes: 0 all checks passed, 1 a check failed or could not run, 3 there is no GPU here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from fastps.bench import exact, kernels_cuda
from fastps.bench.device_fold import DeviceFold
from fastps.bench.gpu.peers import check_folds, check_pairs, devices_of, not_run
from fastps.bench.gpu_worker import GRADIENT, LEARNING_RATE, GpuJob, first_weights
from fastps.bench.measure import BenchOptions, Row
from fastps.device.cuda import CudaDevice
from fastps.device.finite_check import FiniteCheck
from fastps.device.interface import DeviceError
from fastps.errors import Error
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, UPDATE_RULES, examples
from fastps.kernels.cuda import launch_args
from fastps.kernels.update import fold
from fastps.processes.launcher import Launcher
from fastps.processes.options import JobOptions
from fastps.system.machine import machine
from fastps.training.data import load

EXIT_OK, EXIT_FAILED, EXIT_NO_DEVICE = 0, 1, 3
SIZES = (1, 3, 15, 17, 1023, 4095, 4096, 4097, 100_003)
TOLERANCE = 2e-5  # of a weight after one fold in single precision, relative to the greatest
SHARE = 0.85  # of the copy's bandwidth, for SGD with momentum and Adam in single precision
EQUAL = 1e-5  # greatest difference of weights over the greatest weight, GPU against CPU path
LEAST_ACCURACY = 0.85
CASES = (("bsp", "momentum"), ("bsp", "adam"), ("dssp:1,4", "sgd"), ("asp", "sgd"))  # sync and optimizer of a two-process job

PARTS = ("kernels", "bandwidth", "peers", "processes", "several", "going-on", "training")

UPDATES = examples()  # by name


# -- kernels -----------------------------------------------------------------------------------------------------------------


def check_kernels(device: CudaDevice) -> list[Row]:
    """Return a row for each rule, gradient dtype and mode: the greatest relative difference from double precision."""
    return [
        _kernel_row(device, name, dtype, mode)
        for name in UPDATES
        for dtype in launch_args.DTYPES
        for mode in (fold.FOLD_SUM, fold.FOLD_EACH)
    ]


def _kernel_row(device: CudaDevice, name: str, dtype: str, mode: int) -> Row:
    rule, hyper = UPDATES[name].rule, UPDATES[name].hyper
    planes = len(rule.planes)
    differences, told = [], True
    for count, size in enumerate(SIZES):
        random = np.random.default_rng([count, size])
        pushes, ema_decay = 1 + count % 4, 0.9 if count % 2 else 0.0
        weights = random.standard_normal(size, np.float32)
        state = random.standard_normal((planes + (ema_decay > 0), size), np.float32)
        for plane in [rule.planes.index(square) for square in UPDATE_RULES[rule.name].squares if square in rule.planes]:
            state[plane] = np.abs(state[plane]) + 16  # a mean square must exceed the square of the mean
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
        differences += [_difference(found_weights, expected[0]), _difference(found_state, expected[1])]
    worst = max(differences)
    text = "sum" if mode == fold.FOLD_SUM else "each"
    return {
        "check": "kernel",
        "name": f"{name}-{dtype}-{text}",
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
    return [{"check": "kernel", "name": "nonfinite", "ok": all(right)}]


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


def check_bandwidth(device: CudaDevice, parameters: int) -> list[Row]:
    """Run `fastps bench kernels --backend cuda` at one size; SGD with momentum and Adam must reach SHARE of a copy."""
    rows = kernels_cuda.rows_on(device, BenchOptions(parameters=(parameters,), repeats=9, repeat_s=0.2))
    for row in rows:
        row["check"] = "bandwidth"
        row["bound"] = SHARE if row["name"] in ("sgd-momentum", "adam") else None
        row["ok"] = row["bound"] is None or row["limit_share"] >= row["bound"]
    return rows


# -- whole jobs --------------------------------------------------------------------------------------------------------------


def run_job(job: GpuJob, workers: int, placement: str, *, gpus: int = 1, server: str = "workers") -> list[dict[str, Any]]:
    """Run a job's workers, on the first `gpus` GPUs if they use one, and return what each wrote. Raises Error if one failed.

    A job with a death goes on without that worker, which writes nothing.
    """
    names = ("FASTPS_GPUS", "FASTPS_PLACEMENT", "FASTPS_SERVER")
    kept = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="fastps-gpu-check-") as folder:
        path = Path(folder) / "options.json"
        job.save(path)
        try:
            os.environ.pop("FASTPS_GPUS", None)
            if job.device != "cpu":
                os.environ["FASTPS_GPUS"] = ",".join(map(str, range(gpus)))
            os.environ.update(FASTPS_PLACEMENT=placement, FASTPS_SERVER=server)
            options = JobOptions(on_worker_loss="continue") if job.dies_at else JobOptions()
            command = [sys.executable, "-m", "fastps.bench.gpu_worker", str(path)]
            outcome = Launcher(command, workers, options=options).run()
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
        if outcome.first_failure is not None:
            failed = outcome.first_failure
            raise Error(f"worker {failed.rank} of {job}: {failed.ending}: {' '.join(list(failed.tail)[-2:])}")
        written = [path.with_name(f"{rank}.npz") for rank in range(workers) if not (job.dies_at and rank == 1)]
        return [dict(np.load(each)) for each in written]


def check_processes(
    device: str, placement: str, *, gpus: int = 1, server: str = "workers", check: str = "processes"
) -> Iterator[Row]:
    """Compare processes on GPUs, two or one a GPU, with as many on the CPU: bsp with momentum and Adam, dssp and asp."""
    workers = max(2, gpus)
    for sync, optimizer in CASES:
        name = f"{sync}-{optimizer}-{placement}{'-server' if server == 'process' else ''}"
        try:
            expected = run_job(GpuJob("cpu", sync, optimizer), workers, "host")
            found = run_job(GpuJob(device, sync, optimizer), workers, placement, gpus=gpus, server=server)
        except Error as error:
            yield {"check": check, "name": name, "ok": False, "missing": str(error)}
            continue
        worst = max(_difference(each["weights"], expected[0]["weights"]) for each in found)
        kinds = sorted({str(each["kind"]) for each in found})
        versions = {int(each["version"]) for each in (*expected, *found)}
        is_equal = worst <= EQUAL and len(versions) == 1
        yield {
            "check": check,
            "name": name,
            "gpus": gpus,
            "placements": kinds,
            "difference": worst,
            "tolerance": EQUAL,
            "ok": bool(is_equal),
        }


def check_going_on(device: str, placement: str, gpus: int = 1) -> Iterator[Row]:
    """Kill one of the workers of a job with a server: the others end, and every push that was posted is folded once."""
    workers = max(3, gpus)
    for sync in ("bsp", "asp"):
        name = f"{sync}-{placement}-{gpus}-gpus"
        try:
            job = GpuJob(device, sync, constant=True, dies_at=7)
            found = run_job(job, workers, placement, gpus=gpus, server="process")
        except Error as error:
            yield {"check": "going on", "name": name, "ok": False, "missing": str(error)}
            continue
        versions = {int(each["version"]) for each in found}
        first = np.concatenate([values.flatten().numpy() for values in first_weights()])
        expected = first - LEARNING_RATE * GRADIENT * max(versions)
        worst = max(_difference(each["weights"], expected) for each in found)
        posted = (workers - 1) * job.steps + job.dies_at
        is_right = versions == {job.steps if sync == "bsp" else posted} and worst <= EQUAL
        yield {
            "check": "going on",
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
    for scaler in (False, True):
        name = f"{data}{'-amp' if scaler else ''}-{placement}"
        try:
            load(data)
            found = run_job(GpuJob(device, "bsp", data=data, epochs=epochs, scaler=scaler), 2, placement)
        except Error as error:
            yield {"check": "training", "name": name, "ok": False, "missing": str(error)}
            continue
        yield {
            "check": "training",
            "name": name,
            "placements": sorted({str(each["kind"]) for each in found}),
            "accuracy": float(found[0]["accuracy"]),
            "bound": LEAST_ACCURACY,
            "steps_per_s": float(sum(each["steps"] for each in found) / found[0]["seconds"]),
            "ok": bool(found[0]["accuracy"] >= LEAST_ACCURACY),
        }


# -- the command ---------------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run all checks, or one kind, write their rows, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastps.bench.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results"), help="folder of the figures (default: %(default)s)")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="size for the bandwidth (default: %(default)s)")
    parser.add_argument("--data", default="mnist5k", help="data set to train on, as of `fastps train` (default: %(default)s)")
    parser.add_argument("--only", choices=PARTS, help="one kind of check")
    options = parser.parse_args(arguments)
    try:
        gpu = _gpu()
    except DeviceError as error:
        sys.stderr.write(f"gpu_check: no device: {error}\n")
        return EXIT_NO_DEVICE
    count = int(gpu["count"])
    parts: dict[str, Callable[[], list[Row]]] = {
        "kernels": lambda: _on_gpu(lambda device: check_kernels(device) + check_nonfinite(device)),
        "bandwidth": lambda: _on_gpu(lambda device: check_bandwidth(device, options.parameters)),
        "peers": lambda: between_gpus(count, options.parameters),
        "processes": lambda: [row for where in ("device", "host") for row in check_processes("cuda", where)],
        "several": lambda: on_several_gpus("cuda", count),
        "going-on": lambda: going_on("cuda", count),
        "training": lambda: [row for where in ("device", "host") for row in check_training("cuda", where, options.data)],
    }
    assert tuple(parts) == PARTS
    rows: list[Row] = []
    for name, part in parts.items():
        if options.only in (None, name):
            rows += part()
            write(rows, options.out, gpu)  # after each part, so that its rows survive if the next one hangs
    show(rows)
    return EXIT_FAILED if any(row["ok"] is False for row in rows) else EXIT_OK


def show(rows: list[Row]) -> None:
    """Print one line for each row."""
    words = {True: "ok  ", False: "FAIL", None: "not run"}
    for row in rows:
        sys.stdout.write(f"{words[row['ok']]} {row['check']} {row['name']} {_figures(row)}\n")


def between_gpus(
    count: int, parameters: int, devices: Callable[[int], list[Any]] = devices_of, repeat_s: float = 0.1
) -> list[Row]:
    """The rows of peer access, bandwidth and folds over peers of `count` GPUs."""
    if count < 2:
        return [not_run(check, "all pairs", f"needs 2 GPUs, found {count}") for check in ("peers", "fold over peers")]
    made = devices(count)
    try:
        return check_pairs(made, 4 * parameters, repeat_s) + check_folds(made, parameters, repeat_s)
    finally:
        for device in made:
            device.shut()


def on_several_gpus(device: str, count: int) -> list[Row]:
    """The rows of jobs with a worker on each of `count` GPUs, without a server and with one."""
    if count < 2:
        return [not_run("several GPUs", "all cases", f"needs 2 GPUs, found {count}")]
    return [
        row
        for where, server in (("device", "workers"), ("device", "process"), ("host", "workers"))
        for row in check_processes(device, where, gpus=count, server=server, check="several GPUs")
    ]


def going_on(device: str, count: int) -> list[Row]:
    """The rows of deaths in jobs with a server, on one GPU and on all."""
    rows = list(check_going_on(device, "device"))
    if count < 2:
        return [*rows, not_run("going on", "several GPUs", f"needs 2 GPUs, found {count}")]
    return [*rows, *check_going_on(device, "device", count)]


def _gpu() -> dict[str, Any]:
    """Describe the GPU, by a separate process: this one must not initialize CUDA before it starts workers."""
    source = (
        "import json; from fastps.device.cuda import CudaDevice; d = CudaDevice(); r = d._cuda.runtime;"
        " p = r.getDeviceProperties(0); print(json.dumps({'name': p['name'].decode(), 'memory_bytes': int(p['totalGlobalMem']),"
        " 'count': r.getDeviceCount(),"
        " 'compute': [p['major'], p['minor']], 'driver': r.driverGetVersion(), 'runtime': r.runtimeGetVersion(),"
        " 'cupy': d._cuda._cupy.__version__}))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise DeviceError(last.partition(": ")[2] or last)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _on_gpu(check: Callable[[CudaDevice], list[Row]]) -> list[Row]:
    from fastps.device.cuda import CudaDevice

    device = CudaDevice()
    try:
        return check(device)
    finally:
        device.shut()


def write(rows: list[Row], folder: Path, gpu: dict[str, Any]) -> Path:
    """Write the rows with the machine, the GPU and the date; return the file, named after the GPU and the day."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.now(UTC)
    name = "".join(letter if letter.isalnum() else "-" for letter in str(gpu["name"]).lower())
    path = folder / f"gpu-{name}-{now:%Y-%m-%d}.json"
    head = {"command": "gpu_check", "date": now.isoformat(timespec="seconds"), "machine": machine(), "gpu": gpu}
    path.write_text(json.dumps({**head, "torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    return path


def _figures(row: Row) -> str:
    """Format the main figures of a row."""
    shown = {"difference": "{:.2g}", "limit_share": "{:.3f}", "accuracy": "{:.3f}", "steps_per_s": "{:.0f}", "missing": "{}"}
    shown |= {"access": "{}", "bytes_per_s": "{:.3g}", "ratio": "{:.2f}", "version": "{}"}
    return " ".join(f"{key}={form.format(row[key])}" for key, form in shown.items() if key in row)


if __name__ == "__main__":
    sys.exit(main())
