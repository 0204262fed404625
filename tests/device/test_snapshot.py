"""Checkpoints of jobs on devices: the bits of the CPU's, copied while folds go on, and jobs that resume from them."""

import contextlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fastps
from fastps.checkpoint import snapshot
from fastps.checkpoint.runs import Run
from fastps.device.plan import placed_on
from fastps.device.store import DeviceStore
from fastps.lab.gpus.cuda_calls import merged
from fastps.lab.gpus.cuda_on_host import Faults, HostDevice, host_devices
from fastps.lab.gpus.cuda_rules import check_record
from tests.device import test_device as jobs
from tests.device.test_cuda import recorded
from tests.support import processes

UPDATE = fastps.Adam(lr=0.01, weight_decay=0.1)
SYNC = "bsp,ema=0.9"
SAVED, STEPS = 5, 9


def make_store(gpus: list[str], server: str = "workers", resume: Any = None, **options: Any) -> DeviceStore:
    layout = placed_on(jobs.layout_of(UPDATE, SYNC, len(gpus), server=server), gpus)
    make = partial(host_devices, list(dict.fromkeys(gpus)), 0.0005) if server == "process" else None
    return jobs.store_of(layout, UPDATE, resume=resume, server_devices=make, **options)


def steps_of(store: Any, rank: int, first: int, last: int, folder: Path | None, *, ahead: int = 0) -> Any:
    """Take steps [first, last); worker 1 saves a checkpoint of version SAVED, which it reads `ahead` steps later."""
    pinned: Any = None
    with store.attach(rank) as worker:
        for step in range(first, last):
            if folder is not None and rank == 1 and step == SAVED:
                pinned = snapshot.pin(worker, {"seed": 3})
            if pinned is not None and step == SAVED + ahead:
                snapshot.write(pinned, {}, folder, Run.of(store))
                pinned = None
            worker.step(jobs.gradient(rank, step))
        worker.wait_for_others()
        return {name: np.array(values) for name, values in worker.weights.items()}


def run(store: Any, gpus: list[str], work: Any) -> list[Any]:
    def device_of(rank: int) -> HostDevice:
        return HostDevice(gpus[rank], faults=Faults(seed=rank, delay_s=0.002, late_s=0.0005))

    return jobs.in_workers(store, 2, work, device_of if gpus else None)


def on_cpu(folder: Path | None, last: int = STEPS) -> Any:
    store = fastps.Store.create(jobs.first_weights(), UPDATE, sync=SYNC, workers=2)
    return run(store, [], lambda rank: steps_of(store, rank, 0, last, folder))[0]


def contents(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    found = fastps.load(folder)
    kept = ("version", "clocks", "drawn", "workers", "sync", "rule", "param_groups", "extra")
    return {key: found.description[key] for key in kept}, {name: np.array(array) for name, array in found.tensors.items()}


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    (mine, my_tensors), (theirs, their_tensors) = contents(found), contents(expected)
    assert mine == theirs and mine["version"] == SAVED
    assert my_tensors.keys() == their_tensors.keys() and len(my_tensors) == 4 * len(jobs.SHAPES)
    for name, array in their_tensors.items():
        assert np.array_equal(my_tensors[name], array), name


CASES = [
    (["gpu 0", "gpu 1"], "workers"),
    pytest.param(["gpu 0", "gpu 0"], "workers", marks=pytest.mark.slow),
    pytest.param(["gpu 0", "gpu 1"], "process", marks=pytest.mark.slow),
    pytest.param(["gpu 0", "gpu 0"], "process", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("gpus", "server"), CASES)
def test_a_checkpoint_has_the_bits_of_the_cpu_and_the_job_resumes_from_it(gpus: list[str], server: str, tmp_path: Path) -> None:
    expected = on_cpu(tmp_path / "cpu")
    store = make_store(gpus, server)
    found = run(store, gpus, lambda rank: steps_of(store, rank, 0, STEPS, tmp_path / "device", ahead=3))
    assert_same_checkpoint(tmp_path / "device", tmp_path / "cpu")
    resumed = make_store(gpus, server, fastps.load(tmp_path / "device"))
    assert resumed.version == SAVED
    again = run(resumed, gpus, lambda rank: steps_of(resumed, rank, SAVED, STEPS, None))
    for weights in (*found, *again):
        assert all(np.array_equal(weights[name], values) for name, values in expected.items())


def test_steps_go_on_while_a_version_is_copied_and_its_buffers_are_not_written(tmp_path: Path) -> None:
    """The copies of one worker are slow. The version is unpinned when they are done, and not before."""
    gpus, seen = ["gpu 0", "gpu 0"], []

    class SlowDevice(HostDevice):
        def copy(self, to: int, source: int, size: int, stream: Any) -> None:
            snapshots = store._snapshots
            if snapshots is not None and stream == snapshots.stream:
                self.api.queue(stream, "pause", lambda on: time.sleep(0.02))
            super().copy(to, source, size, stream)

    store = make_store(gpus)

    def work(rank: int) -> Any:
        with store.use(SlowDevice(gpus[rank], 0.0005)), store.attach(rank) as worker:
            pinned: Any = None
            for step in range(STEPS):
                if rank == 1 and step == SAVED:
                    pinned = snapshot.pin(worker, {"seed": 3})
                    seen.append(worker.version)
                worker.step(jobs.gradient(rank, step))
                if pinned is not None and len(seen) == 1 and step == SAVED + 2:
                    seen.append(worker.version)
                    assert not pinned._copy._is_done
                    copied = store._snapshots.copied
                    assert store.device.api.events[copied].words[1] == 0, "still copying"
                    snapshot.write(pinned, {}, tmp_path / "device", Run.of(store))
            worker.wait_for_others()
        return seen

    with store:
        assert processes.results(processes.start_each(work, 2), 60)[1] == [SAVED, SAVED + 3]
    on_cpu(tmp_path / "cpu", SAVED + 1)
    assert_same_checkpoint(tmp_path / "device", tmp_path / "cpu")


@pytest.mark.slow
def test_copies_on_gpus_keep_the_rules_of_cuda(tmp_path: Path) -> None:
    gpus, folder = ["gpu 0", "gpu 1"], tmp_path / "device"
    store = make_store(gpus)
    _, calls = recorded(store, gpus, lambda rank: steps_of(store, rank, 0, STEPS, folder, ahead=1))
    whole = merged(*calls)
    assert check_record(whole, [frozenset(gpus)], {call.process for call in whole}) == len(whole)
    on_cpu(tmp_path / "cpu", SAVED + 1)
    assert_same_checkpoint(tmp_path / "device", tmp_path / "cpu")


def test_resumed_state_of_another_model_is_refused(tmp_path: Path) -> None:
    with fastps.Store.create({"w": np.ones(3, np.float32)}, UPDATE, sync=SYNC, workers=1) as store, store.attach(0) as worker:
        saved = fastps.load(fastps.save(worker, tmp_path))
    with pytest.raises(fastps.CheckpointError, match="parameter 0"), contextlib.closing(make_store(["a", "a"], resume=saved)):
        pass
