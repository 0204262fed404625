"""How many calls of CUDA a worker makes in a step. A call costs the host some microseconds, where a step takes milliseconds."""

from collections import Counter

import fastps
from fastps.lab.gpus.cuda_calls import RecordedCuda
from fastps.lab.worlds.device_schedule import Job

GPUS, SHARDS = 8, 48


def calls_of_a_step(workers: int = GPUS, shards: int = SHARDS) -> list[Counter[str]]:
    """The calls of each worker in a step under bsp, whose backward marks the shards: all but those that choose the device.

    cudaSetDevice of the device that is set already stores a number of the thread, and asks the driver for nothing.
    """
    job = Job(fastps.Adam(lr=0.1), workers, shards, backward_s=0.01, marks=True)
    records = []
    for device in job.devices:
        record = RecordedCuda(device.api)
        device._cuda, device._runtime = record, record  # type: ignore[assignment]
        device._launch = record.launch
        records.append(record)
    found: list[Counter[str]] = []

    def note(step: int) -> None:
        found[:] = [Counter(call.name for call in record.calls) for record in records]
        for record in records:
            record.calls.clear()

    job.run(note)
    for counter in found:
        for name in ("setDevice", "compute_stream"):
            del counter[name]
    return found


def test_a_worker_of_eight_makes_at_most_60_calls_a_step_with_48_shards() -> None:
    expected = {
        "eventRecord": 2 + 6 + 1,  # computed by wave, folded by fold, copied
        "streamWaitEvent": 2 * 8
        + 2 * 7
        + 2
        + 1,  # folds for computed, copies for folded, the worker for its own and for copies
        "launch": 6 + 2,  # folds, copies by wave
    }
    for found in calls_of_a_step():
        assert found == expected and found.total() <= 60


def test_one_worker_makes_few_calls_however_many_shards_there_are() -> None:
    [found] = calls_of_a_step(1, 6)
    assert found == {"eventRecord": 2 + 6, "streamWaitEvent": 2 + 2, "launch": 6}
