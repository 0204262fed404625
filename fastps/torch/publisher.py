"""fastps.Publisher: weights of any trainer, as versions that other processes read. It trains nothing.

A publisher is a job whose versions carry all that they have: an arena without parameters, slots and folds. `publish` copies
into a buffer that nobody reads, and one release makes it the newest version.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from fastps.errors import LayoutError, UnsupportedError, UsageError
from fastps.job import environment
from fastps.job.layout import TAG, Layout, place_carried
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Rule
from fastps.kernels.update import fold
from fastps.membership.job_memory import JobMemory
from fastps.store.freed_readers import FreedReaders
from fastps.store.store import StartAt, Store
from fastps.system import exit_handlers
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.torch.carried import Sources, mark_at, places_of, views_at
from fastps.torch.names import without_wrappers
from fastps.torch.tensor_loops import copier_into

TAG_BYTES = 4096
# So much is copied sooner by one loop than by torch, which may share the work among threads; and if it has one thread. The loop
# keeps the GIL.
_LITTLE_BYTES, _LITTLE_BYTES_ALONE = 1 << 20, 16 << 20
_MOST_VERSIONS = 1 << 39
_RULE = Rule("published", fold.RULES["sgd"], ())  # nothing is folded


@dataclass
class _Buffer:
    """A weights buffer as a publisher writes it: tensors over its values, the loop that copies into them, and its tag."""

    views: list[torch.Tensor]
    take: Callable[[list[torch.Tensor]], bool] | None
    tag_bytes: npt.NDArray[Any]
    tag: bytes | None = None


class Publisher:
    """The newest weights of a model, for readers in other processes: `fastps.reader(job)`. Only one thread may use it.

    Any trainer and any optimizer will do, on a CPU or a GPU. Parameters, all buffers and the tag of a `publish` are one
    version, whole or not at all, also if this process is killed meanwhile. No reader waits for it, or holds it up.

    >>> import fastps
    >>> model = torch.nn.BatchNorm1d(2)
    >>> other = torch.nn.BatchNorm1d(2)
    >>> with Publisher(model, "publisher-example") as publisher:
    ...     _ = model(torch.randn(8, 2))
    ...     version = publisher.publish(tag={"steps": 1})
    ...     with fastps.reader("publisher-example") as reader:
    ...         reader.update(other), reader.tag, torch.equal(other.running_mean, model.running_mean)
    (1, {'steps': 1}, True)

    Args:
        source: the model; or a mapping of names to tensors or models, whose names begin with theirs and a dot.
        job: the name by which readers find it.
        readers: the most processes that read at a time. Each costs a copy of the tensors, from its coming to its end.
        first_version: the version of what the source has now; for a trainer that goes on where an earlier one ended.

    Raises UsageError for a source without tensors, UnsupportedError for a tensor that is not dense, AttachError if the job's
    name is taken, ArenaError if there is too little memory.
    """

    def __init__(
        self,
        source: torch.nn.Module | Mapping[str, Any],
        job: str = "policy",
        *,
        readers: int = 8,
        first_version: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        if environment.is_virtual():
            raise UnsupportedError("a Publisher in virtual time: expected a real run, because readers come at real moments")
        if not 0 <= first_version < _MOST_VERSIONS:
            raise UsageError(f"first_version: expected 0 to {_MOST_VERSIONS - 1}, found {first_version}")
        self._sources = Sources(_named(source), is_strict=True)
        if not self._sources.rows:
            raise UsageError("expected a model with parameters or buffers to publish, or a mapping of tensors, found none")
        carried = place_carried([(TAG, (TAG_BYTES,), (1,), "uint8"), *self._sources.rows])
        layout = Layout((), 1, _RULE, parse_policy("asp"), 1, carried=carried, max_readers=readers)
        start = StartAt(first_version, partial(self._write, 0, self._sources.tensors(), b""))
        self.job = job
        self._buffers: dict[int, _Buffer] = {}
        self._store = Store.create_for(layout, lambda views: None, [], resume=start, job=job, clock=clock)
        try:
            self._worker = self._store.attach(0)
        except BaseException:
            self._store.close()
            raise
        self._lane = self._worker.lane
        self._lane.unpin()  # a publisher reads nothing
        self._freed_readers = FreedReaders(self._worker)
        exit_handlers.register(self, lambda failure: self.close())

    def publish(self, values: Mapping[str, Any] | None = None, *, tag: Mapping[str, Any] | None = None) -> int:
        """Make the tensors as they are now the next version, and return its number.

        `values`: other tensors under the same names, as a `state_dict`. `tag`: what readers find as `reader.tag`, of JSON's
        types, at most 4 KiB as text.

        Raises LayoutError for a tensor that is missing or of another shape or type than when the publisher was made, UsageError
        for a tag that is no JSON or too long, after close, and in a forked child.
        """
        if self._worker.closed:
            raise UsageError(f"publish() after close(): the job {self.job!r} has ended; make another Publisher")
        self._worker.check_usable()
        tensors = self._sources.tensors() if values is None else self._given(values)
        text = _text_of(tag) if tag else b""
        if not self._lane.hold(0):
            self._worker.lock_shards()
        is_whole = False
        try:
            self._write(self._lane.spare(0)[0], tensors, text, self._store)
            is_whole = True
        finally:
            self._worker.release_version(is_whole)
        self._freed_readers.look(self._store.clock.now_ns(), self._drop)
        return self._store.version

    @property
    def version(self) -> int:
        """The number of the newest version."""
        return self._store.version

    @property
    def stop_asked(self) -> bool:
        """Whether a reader has asked this training to stop, as an evaluator does whose metric gets no better."""
        return self._store.arena.is_asked_to_stop()

    def close(self) -> None:
        """End the job: readers keep its last version, and hear that it is over. Runs at exit; may be called twice."""
        if self._worker.closed or self._worker.forked:
            return
        exit_handlers.forget(self)
        self._worker.close()
        self._buffers.clear()
        self._store.close()

    def _write(self, buffer: int, tensors: list[torch.Tensor], text: bytes, store: JobMemory) -> None:
        """Write a version into a weights buffer that nobody reads."""
        into = self._buffers.get(buffer) or self._make(buffer, store)
        little = _LITTLE_BYTES if torch.get_num_threads() > 1 else _LITTLE_BYTES_ALONE
        if into.take is None or self._sources.nbytes > little or not into.take(tensors):
            if (misfit := self._sources.misfit(tensors)) >= 0:
                self._refuse(misfit, tensors[misfit])
            with torch.no_grad():
                torch._foreach_copy_(into.views, tensors)
        if text != into.tag:
            into.tag_bytes[:] = np.frombuffer(text.ljust(TAG_BYTES, b"\0"), np.uint8)
            into.tag = text

    def _make(self, buffer: int, store: JobMemory) -> _Buffer:
        """Say of a buffer that what is carried is there, which stays true, and return its tensors."""
        offset = store.arena.carried_offset(buffer)
        mark_at(store, offset)[0] = 1
        tag, *views = views_at(store, store.layout.carried, offset)
        self._buffers[buffer] = made = _Buffer(views, copier_into(views), tag.numpy())
        return made

    def _drop(self, buffer: int) -> None:
        self._buffers.pop(buffer, None)

    def _given(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        found, known = _named(values), {row[0] for row in self._sources.rows}
        plain = without_wrappers(found) if found.keys() - known else {}  # of a compiled model's state_dict, say
        named = {plain.get(name, name): held[key] for name, (held, key) in found.items()}
        unknown = named.keys() - known
        if unknown:
            raise LayoutError(f"job {self.job} publishes no {sorted(unknown)[0]!r}: give the tensors that it was made with")
        missing = next((index for index, row in enumerate(self._sources.rows) if row[0] not in named), -1)
        if missing >= 0:
            self._refuse(missing, None)
        return [named[row[0]] for row in self._sources.rows]

    def _refuse(self, index: int, tensor: torch.Tensor | None) -> None:
        name, shape, _, kind = self._sources.rows[index]
        found = "none" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
        raise LayoutError(
            f"job {self.job} publishes {name!r}: expected {kind} of shape {shape}, as when it was made, found {found}; make"
            " another Publisher once shapes have changed"
        )

    def __reduce__(self) -> Any:
        """Raise UsageError: a copy would be a second publisher of one name."""
        raise UsageError("a Publisher cannot be copied or pickled: make it in the process that publishes")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _named(source: torch.nn.Module | Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], str]]:
    """Where each tensor of a source is held, by name."""
    if isinstance(source, torch.nn.Module):
        return places_of(source, parameters=True)
    found: dict[str, tuple[dict[str, Any], str]] = {}
    held = dict(source)
    for name, value in held.items():
        if isinstance(value, torch.nn.Module):
            found |= {f"{name}.{each}": place for each, place in places_of(value, parameters=True).items()}
        elif isinstance(value, torch.Tensor):
            found[name] = (held, name)
        else:
            raise UsageError(f"{name!r}: expected a tensor or a model to publish, found {type(value).__name__}")
    return found


def _text_of(tag: Mapping[str, Any]) -> bytes:
    try:
        if odd := [key for key in tag if not isinstance(key, str)]:
            raise TypeError(f"a key is {odd[0]!r}, and no text")
        text = json.dumps(dict(tag)).encode()
    except (TypeError, ValueError) as error:
        raise UsageError(f"tag: expected a dict of JSON's types, found {tag!r} ({error})") from None
    if len(text) > TAG_BYTES:
        raise UsageError(f"tag: expected at most {TAG_BYTES} bytes of JSON, found {len(text)}; publish a tensor instead")
    return text
