"""A model's buffers (BatchNorm's running statistics): published by each worker, averaged for evaluation.

Each lane has one slot for buffers in the arena, and on one node of several an agent brings those of the other nodes. The slot
holds the round in which its worker published and the last round that the worker has read, so every worker computes the same
average in a round. The caller holds all shard locks while it reads or writes slots. Between evaluations every worker keeps
running statistics of its own.

Buffers are taken from the model each time, because a module may assign, register or resize them: a slot says which it holds.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from fastps.errors import ProtocolError, UsageError
from fastps.job.limits import ROOM_HEADER_BYTES
from fastps.kernels.shm.arena import LANE_JOINING, LANE_LIVE
from fastps.store.lane_room import LENGTH, ORDER, PUBLISHED, READ, USED, VALID, LaneRooms, Slot, words_of
from fastps.store.worker import Worker
from fastps.torch.carried import CarriedBuffers
from fastps.torch.names import of_model

logger = logging.getLogger("fastps.torch")

_ROOM_BYTES = 1 << 20  # the least room for a model that has buffers: they may grow
_PAUSE_NS = 200_000
_SUMMED = (torch.float32, torch.float64, torch.complex64, torch.complex128)  # types in which averages are made as they are
Named = dict[str, torch.Tensor]


class ModelBuffers:
    """The buffers of a module; none without a module. Quantized and sparse ones stay each worker's own."""

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model, self.has_model = model, model is not None
        self.carried = CarriedBuffers(model)
        self._said: set[str] = set()
        named = self._now()
        total = sum(_aligned(buffer.nbytes) for buffer in named.values())
        self.nbytes = max(_ROOM_BYTES, 1 << (2 * total).bit_length()) if named else 0
        """Size of a slot in bytes, in which the buffers may double; 0 if the module had none when it was wrapped."""

    def _now(self) -> Named:
        named = of_model(dict(self._model.named_buffers())) if self._model is not None else {}
        return {name: each.detach() for name, each in named.items() if each.layout is torch.strided and not each.is_quantized}

    def publish(self, slot: Slot, number: int) -> None:
        """Write all buffers into this worker's slot, for round `number`; none if they have outgrown it."""
        named = {name: buffer.cpu().contiguous() for name, buffer in self._now().items()}
        text = json.dumps([[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in named.items()])
        pieces = [np.frombuffer(text.encode(), np.uint8)]
        pieces += [each.reshape(-1).view(torch.uint8).numpy() for each in named.values() if each.numel()]
        offset = ROOM_HEADER_BYTES
        if offset + sum(_aligned(len(piece)) for piece in pieces) > self.nbytes:
            self._say(
                "the model's buffers have outgrown their room in the arena, and are not averaged: wrap it after its first"
                " forward"
            )
            pieces = [np.frombuffer(b"[]", np.uint8)]
        for piece in pieces:
            slot[offset : offset + len(piece)] = piece
            offset += _aligned(len(piece))
        words_of(slot)[[VALID, PUBLISHED, LENGTH, USED]] = 1, number, len(pieces[0]), min(offset, len(slot))

    def average(self, slots: Sequence[Slot]) -> None:
        """Set the module's buffers to the average of the published slots.

        A variance is averaged about the common mean: it is the mean of the variances and the variance of the means. A counter
        (any integer buffer) takes the maximum. Any other buffer is averaged elementwise. One that is not of one shape in all
        workers, or cannot be written to, stays each worker's own, and a warning names it.
        """
        published = [_published(slot[: self.nbytes]) for slot in slots if words_of(slot)[VALID]]
        for name, buffer in self._now().items():
            found = [each.get(name) for each in published]
            values = [each for each in found if each is not None and each.shape == buffer.shape and each.dtype == buffer.dtype]
            if len(values) < len(published):
                self._say(f"buffer {name!r} is not of one shape in all workers, so it is not averaged: each keeps its own")
                continue
            of_mean = name.removesuffix("running_var") + "running_mean" if name.endswith("running_var") else ""
            means = [each[of_mean] for each in published if of_mean in each]
            means = means if len(means) == len(values) else []
            if _are_equal(values) and _are_equal(means):
                continue
            try:
                buffer.copy_(_mean(values, means))
            except RuntimeError as error:  # an expanded tensor, say
                self._say(f"buffer {name!r} cannot be written to, so it is not averaged: each worker keeps its own ({error})")

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s", text)


def _are_equal(values: list[torch.Tensor]) -> bool:
    """Whether all values have the same bits."""
    found = [each.reshape(-1).view(torch.uint8) for each in values]
    return all(torch.equal(each, found[0]) for each in found)


def _mean(values: list[torch.Tensor], means: list[torch.Tensor]) -> torch.Tensor:
    """The average of a buffer's values; of a variance, about these means."""
    if not values[0].is_floating_point() and not values[0].is_complex():
        return torch.stack([each.long() for each in values]).amax(0)
    mean = _stacked(values).mean(0)
    return mean + _stacked(means).var(0, unbiased=False) if means else mean


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """The values as one tensor, of a type in which sums are exact enough."""
    return torch.stack([each if each.dtype in _SUMMED else each.float() for each in values])


def _published(slot: Slot) -> Mapping[str, torch.Tensor]:
    """What a worker has published, by name. Raises ProtocolError for a slot that no worker has written so."""
    try:
        length = int(words_of(slot)[LENGTH])
        found, offset = {}, ROOM_HEADER_BYTES + _aligned(length)
        for name, dtype, shape in json.loads(bytes(slot[ROOM_HEADER_BYTES : ROOM_HEADER_BYTES + length])):
            empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            piece = torch.from_numpy(slot[offset : offset + empty.nbytes].copy())
            found[name] = piece.view(empty.dtype).view(shape) if empty.numel() else torch.empty(shape, dtype=empty.dtype)
            offset += _aligned(empty.nbytes)
        return found
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ProtocolError(f"a worker's slot of buffers is damaged: {error}") from error


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
        if not self._buffers.has_model:
            raise UsageError("average_buffers() needs the model: pass model= when wrapping the optimizer")
        self._worker.check_moment("average_buffers()")  # the others cannot wait for a worker that is driven
        if not self._buffers.nbytes:
            return
        number = self._last() + 1
        self._publish(number, number - 1)
        self._wait(lambda lane: self._word(lane, PUBLISHED) >= number, number)
        self._worker.combining.wait_for_buffers(number)
        with self._worker.locked():
            # Those of live workers, and of workers that left in good order; of all nodes, and in the same order on each.
            slots = [*self._rooms.kept(), *(slot for slot in self._rooms.others if words_of(slot)[VALID])]
            self._buffers.average(sorted(slots, key=lambda slot: int(words_of(slot)[ORDER])))
            words_of(self._slots[self._worker.rank])[READ] = number
        self._number = number

    def leave(self) -> None:
        """Publish for rounds after this worker has left; the others do not wait for it then."""
        if self._buffers.nbytes:
            self._publish(self._last(), self._last())

    def _publish(self, number: int, read: int) -> None:
        """Publish for a round, once the others have read round `read`; those that published in it still need this slot."""
        self._wait(lambda lane: self._word(lane, READ) >= min(self._word(lane, PUBLISHED), read), read)
        with self._worker.locked():
            self._buffers.publish(self._slots[self._worker.rank], number)

    def _last(self) -> int:
        """This worker's last round; for a worker that has just attached, the last round that the others have finished."""
        if not self._slots:
            self._rooms = LaneRooms(self._worker.store, self._buffers.nbytes)
            self._slots = self._rooms.own
        if self._number < 0:
            self._number = max([0, *(self._word(lane, READ) for lane in self._others())])
            words_of(self._slots[self._worker.rank])[[PUBLISHED, READ]] = self._number
        return self._number

    def _others(self) -> list[int]:
        states = self._arena.lane_states()[: len(self._slots)]
        return [lane for lane, state in enumerate(states) if state in (LANE_LIVE, LANE_JOINING) and lane != self._worker.rank]

    def _word(self, lane: int, word: int) -> int:
        return int(words_of(self._slots[lane])[word])

    def _wait(self, is_there: Callable[[int], bool], number: int) -> None:
        def has_come() -> bool:
            return all(is_there(lane) for lane in self._others())

        def text() -> str:
            missing = ", ".join(f"worker {lane}" for lane in self._others() if not is_there(lane))
            return (
                f"worker {self._worker.rank} waited {self._worker.store.timeout_s:g} s in average_buffers(), its call number"
                f" {number}, for {missing}: expected every live worker to call it as often as the others; raise FASTPS_TIMEOUT"
                " if they are only slow"
            )

        self._worker.wait_until(has_come, _PAUSE_NS, text, combines=True)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64
