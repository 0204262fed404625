"""A model's buffers (BatchNorm's running statistics): published by each worker, averaged for evaluation.

Each lane has one slot for buffers in the arena. The slot holds the round in which its worker published and the last round that
the worker has read, so every worker computes the same average in a round. The caller holds all shard locks while it reads or
writes slots. Between evaluations every worker keeps running statistics of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import UsageError
from fastps.kernels.shm.arena import LANE_DEAD, LANE_EXPELLED, LANE_FAILED, LANE_JOINING, LANE_LIVE
from fastps.store.worker import Worker

_HEADER_BYTES = 64  # a slot's first cache line: int64 words
_VALID, _PUBLISHED, _READ = 0, 1, 2  # 1 once the worker has published; the round in which it did; the last round that it read
_PAUSE_NS = 200_000
Slot = npt.NDArray[np.uint8]


class ModelBuffers:
    """The buffers of a module, in the module's order; empty without a module."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._given = model is not None
        self._buffers = dict(model.named_buffers()) if model is not None else {}

    @property
    def nbytes(self) -> int:
        """Size of a slot in bytes; 0 if there is nothing to publish."""
        total = sum(_aligned(buffer.nbytes) for buffer in self._buffers.values())
        return _HEADER_BYTES + total if total else 0

    def check_given(self) -> None:
        """Raise UsageError if no module was given."""
        if not self._given:
            raise UsageError("average_buffers() needs the model: pass model= when wrapping the optimizer")

    def publish(self, slot: Slot, number: int) -> None:
        """Write all buffers into this worker's slot, for round `number`."""
        for buffer, view in zip(self._buffers.values(), self._views(slot), strict=True):
            view.copy_(buffer)
        _header(slot)[[_VALID, _PUBLISHED]] = 1, number

    def average(self, slots: Sequence[Slot]) -> None:
        """Set the module's buffers to the average of the published slots.

        A variance is averaged by its moments about the common mean: mean(var + mean^2) - mean(mean)^2. A counter (any integer
        buffer) takes the maximum. Any other buffer is averaged elementwise.
        """
        published = [self._views(slot) for slot in slots if _header(slot)[_VALID]]
        names = list(self._buffers)
        columns = {name: [views[index] for views in published] for index, name in enumerate(names)}
        for name, buffer in self._buffers.items():
            values = columns[name]
            mean_name = name.removesuffix("running_var") + "running_mean"
            if not buffer.is_floating_point():
                buffer.copy_(torch.stack(values).amax(0))
                continue
            values = _in_single(values)
            if name.endswith("running_var") and mean_name in columns:
                means = _in_single(columns[mean_name])
                moments = torch.stack([value + mean**2 for value, mean in zip(values, means, strict=True)])
                buffer.copy_(moments.mean(0) - torch.stack(means).mean(0) ** 2)
            else:
                buffer.copy_(torch.stack(values).mean(0))

    def _views(self, slot: npt.NDArray[np.uint8]) -> list[torch.Tensor]:
        views: list[Any] = []
        offset = _HEADER_BYTES
        for buffer in self._buffers.values():
            piece = torch.from_numpy(slot[offset : offset + buffer.nbytes])
            views.append(piece.view(buffer.dtype).view(buffer.shape))
            offset += _aligned(buffer.nbytes)
        return views


class BufferRounds:
    """The rounds in which the workers of one arena average their buffers. Each worker takes part in every round, in order."""

    def __init__(self, buffers: ModelBuffers, worker: Worker) -> None:
        self._buffers = buffers
        self._worker = worker
        self._arena = worker.store.arena
        self._number = -1  # this worker's last round; -1 if not known yet
        self._slots: list[Slot] = []

    def average(self) -> None:
        """Take part in the next round: publish, wait for every live worker, average. Raises what waiting raises."""
        self._buffers.check_given()
        if not self._buffers.nbytes:
            return
        number = self._last() + 1
        self._wait_until_read(number - 1)
        self._with_locks(lambda: self._buffers.publish(self._slots[self._worker.rank], number))
        self._wait(lambda lane: self._word(lane, _PUBLISHED) >= number, number)
        self._with_locks(lambda: self._read(number))
        self._number = number

    def leave(self) -> None:
        """Publish for rounds after this worker has left; the others do not wait for it then."""
        if self._buffers.nbytes:
            number = self._last()
            self._wait_until_read(number)
            self._with_locks(lambda: self._buffers.publish(self._slots[self._worker.rank], number))

    def _last(self) -> int:
        """This worker's last round; for a worker that has just attached, the last round that the others have finished."""
        if not self._slots:
            self._slots = [self._worker.store.extra_view(lane) for lane in range(self._worker.store.layout.lanes)]
        if self._number < 0:
            self._number = max([0, *(self._word(lane, _READ) for lane in self._others())])
            _header(self._slots[self._worker.rank])[[_PUBLISHED, _READ]] = self._number
        return self._number

    def _others(self) -> list[int]:
        """The lanes of the other live workers."""
        states = self._arena.lane_states()[: len(self._slots)]
        return [lane for lane, state in enumerate(states) if state in (LANE_LIVE, LANE_JOINING) and lane != self._worker.rank]

    def _word(self, lane: int, word: int) -> int:
        return int(_header(self._slots[lane])[word])

    def _wait_until_read(self, number: int) -> None:
        """Wait until the others have read the slots of that round; a worker that published in it still needs this slot."""
        self._wait(lambda lane: self._word(lane, _READ) >= min(self._word(lane, _PUBLISHED), number), number)

    def _wait(self, is_there: Callable[[int], bool], number: int) -> None:
        def has_come() -> bool:
            self._worker.try_combine()
            return all(is_there(lane) for lane in self._others())

        def text() -> str:
            missing = ", ".join(f"worker {lane}" for lane in self._others() if not is_there(lane))
            return (
                f"worker {self._worker.rank} waited {self._worker.store.timeout_s:g} s in average_buffers(), its call number"
                f" {number}, for {missing}: expected every live worker to call it as often as the others; raise FASTPS_TIMEOUT"
                " if they are only slow"
            )

        self._worker.wait_until(has_come, _PAUSE_NS, text)

    def _with_locks(self, act: Callable[[], None]) -> None:
        self._worker.lock_shards()
        try:
            act()
        finally:
            self._worker.unlock_shards(False)

    def _read(self, number: int) -> None:
        """Average the buffers that live workers, and workers that left in good order, have published."""
        gone = (LANE_DEAD, LANE_FAILED, LANE_EXPELLED)
        states = self._arena.lane_states()
        self._buffers.average([slot for lane, slot in enumerate(self._slots) if states[lane] not in gone])
        _header(self._slots[self._worker.rank])[_READ] = number


def _in_single(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Halves as float32, in which their averages are made; others as they are."""
    return [value.float() if value.dtype in (torch.float16, torch.bfloat16) else value for value in values]


def _header(slot: Slot) -> npt.NDArray[np.int64]:
    return slot[:_HEADER_BYTES].view(np.int64)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
