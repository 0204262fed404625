"""The `state` of a wrapped optimizer: read from the job when a script reads it, and written back at the next step if changed.

Both optimizers, fastps' and the wrapped one, share this mapping. A script may replace it, clear it, or write to its tensors, as
in torch. What a script adds to it under names of its own stays this worker's.
"""

import contextlib
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastps.errors import UsageError

Entry = dict[str, Any]
_READS = ["__getitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__", "get", "keys", "values", "items", "copy"]
_WRITES = ["__setitem__", "__delitem__", "__ior__", "pop", "popitem", "setdefault", "update", "clear"]


class _Entry(dict[str, Any]):
    """An entry as a script gets it, to which a weak reference may be made."""

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def objects(self) -> dict[str, int]:
        """Which object each name has."""
        return {name: id(value) for name, value in self.items()}


class JobState(defaultdict[Any, Any]):
    """Each parameter's entry in torch's state. An ordinary defaultdict until `attach`, and after `detach`."""

    __slots__ = ("_added", "_earlier", "_earlier_entries", "_keys", "_lent", "_names", "_read", "is_lent")  # for speed

    def __init__(self, entries: Mapping[Any, Entry] | None = None) -> None:
        super().__init__(dict, entries or {})
        self.is_lent = False  # whether a script may have written to it, or to tensors that it took from it
        self._read: Callable[[], Iterable[tuple[Any, Entry]]] | None = None
        self._keys: frozenset[Any] = frozenset()
        self._names: frozenset[str] = frozenset()
        self._added: dict[Any, Any] = {}  # the script's own, while the entries are forgotten
        self._lent: dict[Any, Entry] | None = None  # copies of the entries as they were read, since the last step
        self._earlier: list[tuple[weakref.ref[torch.Tensor], int, str]] = []  # tensors of earlier reads, and their versions
        self._earlier_entries: list[tuple[weakref.ref[_Entry], dict[str, int]]] = []  # likewise, and their objects

    def attach(self, read: Callable[[], Iterable[tuple[Any, Entry]]], keys: Iterable[Any], names: Iterable[str]) -> None:
        """Forget the entries; from now on the first access after a step reads them by this function.

        `keys`, `names`: the parameters that have an entry in the job's state, and the names in it. Others are the script's own.
        """
        self._read, self._keys, self._names = read, frozenset(keys), frozenset(names)
        self.forget()

    def detach(self, *, reads: bool = True) -> None:
        """Keep the entries from now on; `reads`: read them a last time, unless a script has done so since the last step."""
        try:
            if reads and self._read is not None and self._lent is None:
                self._fill()
            dict.update(self, {key: dict(entry) for key, entry in dict.items(self) if isinstance(entry, _Entry)})
        finally:
            self._read, self._lent, self.is_lent = None, None, False
            self._earlier.clear()
            self._earlier_entries.clear()

    @contextlib.contextmanager
    def handed_out(self) -> Iterator[None]:
        """Have entries inside the block that nobody else has."""
        lent, entries = self._lent, dict(dict.items(self))
        if lent is None:
            self._fill()
            dict.update(self, {key: dict(entry) for key, entry in dict.items(self) if key in self._keys})
        else:
            dict.update(self, {key: _copies(entry) for key, entry in entries.items() if key in self._keys})
        self._lent = {}
        try:
            yield
        finally:
            self._lent = lent
            dict.clear(self)
            dict.update(self, entries)

    def _fill(self) -> None:
        assert self._read is not None
        dict.update(self, {key: _Entry(entry) for key, entry in self._read()})
        for key, own in self._added.items():
            dict.__setitem__(self, key, _Entry({**dict.get(self, key, {}), **own}) if key in self._keys else own)

    def _job_part(self, key: Any) -> Entry:
        return {name: value for name, value in dict.get(self, key, {}).items() if name in self._names}

    def forget(self) -> None:
        """Read the entries again at the next access."""
        lent, self._lent = self._lent, None
        for key in lent or ():
            if isinstance(entry := dict.get(self, key), _Entry):
                self._earlier_entries.append((weakref.ref(entry), entry.objects()))
            for name, value in self._job_part(key).items():
                if isinstance(value, torch.Tensor) and not value.is_inference():
                    self._earlier.append((weakref.ref(value), value._version, name))
        if lent is not None or len(dict.keys(self)):
            self._added = {
                key: {name: value for name, value in entry.items() if name not in self._names} if key in self._keys else entry
                for key, entry in dict.items(self)
            }
        entry = None  # the loop's last one would look as if a script kept it
        dict.clear(self)
        self._earlier = [each for each in self._earlier if each[0]() is not None]
        self._earlier_entries = [each for each in self._earlier_entries if each[0]() is not None]
        self.is_lent = bool(self._earlier or self._earlier_entries)

    def replace(self, entries: Mapping[Any, Entry]) -> None:
        """Take these entries in place of all."""
        if entries is not self:
            self.clear()
            self.update(entries)

    def take_changes(self, keys: Sequence[Any]) -> list[Entry | None]:
        """For each key its entry if a script has changed it since the last step, else None; then `forget`.

        Raises UsageError if a script has written to an entry, or a tensor, that it took before the last step.
        """
        for held, objects in self._earlier_entries:
            entry = held()
            if entry is not None and entry.objects() != objects:
                raise UsageError(
                    "optimizer.state: an entry that was read before the last step() was changed, and the job has newer values:"
                    " read optimizer.state[parameter] again, then write"
                )
        for reference, version, name in self._earlier:
            value = reference()
            if value is not None and value._version != version:
                raise UsageError(
                    f"optimizer.state: a tensor {name!r} that was read before the last step() was written to, and the job has"
                    " newer values: read optimizer.state[parameter] again, then write"
                )
        lent = self._lent
        changes = [
            None if lent is None or _are_equal(self._job_part(key), lent.get(key, {})) else self._job_part(key) for key in keys
        ]
        self.forget()
        return changes

    def _read_once(self) -> None:
        if self._read is None or self._lent is not None:
            return
        self._fill()
        self._lent = {key: _copies(self._job_part(key)) for key in dict.keys(self) if key in self._keys}
        self.is_lent = True

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _copies(entry: Entry) -> Entry:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_is_equal(value, other[name]) for name, value in one.items())


def _is_equal(one: Any, other: Any) -> bool:
    if one is None or other is None:  # SGD's momentum before its first step
        return one is other
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def _reading_first(name: str) -> Any:
    method = getattr(defaultdict, name)

    @functools.wraps(method)
    def call(self: JobState, *arguments: Any, **named: Any) -> Any:
        self._read_once()
        return method(self, *arguments, **named)

    return call


for _name in (*_READS, *_WRITES):
    setattr(JobState, _name, _reading_first(_name))
