"""The loops over a model's tensors in each step: compiled against torch's C++ tensors, or over Python attributes.

Both have the same effect, but for `own`; the compiled loops are faster (`fastps bench step --against attributes`). They need
exactly the torch version that they were built against: beside it when fastps was installed from source, or on this machine
into a cache, which FASTPS_TENSOR_LOOPS=build asks for. Otherwise, or with FASTPS_TENSOR_LOOPS=attributes, the loops are over
attributes; `why_not_compiled` tells the reason.
"""

import functools
import importlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.autograd.graph import increment_version

from fastps.job.options import value_of
from fastps.kernels.tensors.attributes import Attribute
from fastps.torch import built_loops

_installed: ModuleType | None = None
try:
    _installed = importlib.import_module("fastps.kernels.tensors.torch_tensors")
except ModuleNotFoundError:
    _fault = "the compiled loops are not there (a wheel has none)"
except ImportError as _error:  # built against a torch with other symbols
    _fault = f"the compiled loops do not load ({_error})"

logger = logging.getLogger("fastps.torch")

_all: "weakref.WeakSet[TensorLoops]" = weakref.WeakSet()  # views of one tensor have one version counter, also in two optimizers
_counting = threading.RLock()  # held where versions are remembered: each of two threads may train with its own optimizer

TORCH = torch.__version__.partition("+")[0]


Place = tuple[int, torch.Size, tuple[int, ...]]


def place_of(tensor: torch.Tensor) -> Place:
    """Where a tensor's memory lies, and in which form it shows that."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class TensorLoops:
    """Loops over a fixed list of tensors, here over Python attributes for any torch; the compiled ones do the same."""

    can_own = False  # whether `own` parts a value from all others, and `own_all` all values; here only each `grad` is parted
    _remembered: list[int]

    def __init__(self, tensors: list[torch.Tensor], uncounted: Collection[int] = ()) -> None:
        self._tensors = tensors
        self._uncounted = uncounted
        self._data = Attribute("data", tensors)
        self._grad = Attribute("grad", tensors)
        self._counters = Attribute("_version", tensors)
        with _counting:
            self.remember()
            _all.add(self)

    def prepare(self, values: list[torch.Tensor], memory: object = None) -> Any:
        """Convert these values, one per tensor, to the form that the other loops take. The values must not change afterwards.

        memory: the one object that all values are views of, if any. Compiled loops show such values faster: a tensor
        then keeps one storage whose pointer moves, so every alias of that storage (`detach()`) shows the new values, too.
        Raises ValueError unless there are as many values as tensors.
        """
        if len(values) != len(self._tensors):
            raise ValueError(f"expected {len(self._tensors)} tensors, found {len(values)}")
        return list(values)

    def show(self, values: list[torch.Tensor], is_write: bool = False) -> None:
        """Point `data` of each tensor at its value: no copy. With `is_write` autograd knows, as by `count_writes` of all."""
        self._data.set(self._tensors, values)
        self._places = list(map(place_of, self._tensors))
        if is_write:
            self.count_writes(self._tensors)

    def show_copies(self) -> None:
        """Give each tensor a private copy of its values. What follows it by its storage goes along."""
        for tensor in self._tensors:
            tensor.data = tensor.data.clone(memory_format=torch.preserve_format)

    def count_writes(self, written: list[torch.Tensor]) -> None:
        """Let autograd know that these tensors have new values, as a write would. No loops' `changed` sees it."""
        with _counting:
            before = [(loops, loops._counters.get(loops._tensors)) for loops in _all]
            increment_version(written)
            for loops, versions in before:
                counted = zip(loops._remembered, versions, loops._counters.get(loops._tensors), strict=True)
                loops._remembered = [count - old + new for count, old, new in counted]

    def remember(self) -> None:
        """Accept all writes to the tensors, and their addresses, so that `changed` does not report them."""
        with _counting:
            self._remembered = self._counters.get(self._tensors)
            self._places = list(map(place_of, self._tensors))

    def changed(self) -> int:
        """The index of the first tensor written to or pointed elsewhere since `remember`, or -1. `show` is no change."""
        if len(self._uncounted) < len(self._tensors) and self._counters.are(self._tensors, self._remembered) >= 0:
            with _counting:  # another thread may have been in `count_writes`
                counts = self._counters.get(self._tensors)
                pairs = enumerate(zip(counts, self._remembered, strict=True))
            for index, (count, remembered) in pairs:
                if count != remembered and index not in self._uncounted:
                    return index
        return next((index for index in range(len(self._tensors)) if self.has_moved(index)), -1)

    def has_moved(self, index: int) -> bool:
        """Whether a tensor was pointed at other memory, or at it in another form, since `remember`, other than by `show`."""
        return place_of(self._tensors[index]) != self._places[index]

    def set_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Set `grad` of each tensor to its element of `gradients`."""
        self._grad.set(self._tensors, gradients)

    def drop_gradients(self) -> None:
        """Set `grad` of each tensor to None."""
        self._grad.set_all(self._tensors, None)

    def other_gradient(self, gradients: list[torch.Tensor]) -> int:
        """The index of the first tensor whose `grad` is not the same object as its element of `gradients`, or -1."""
        return self._grad.are(self._tensors, gradients)

    def has_new_gradient(self, index: int) -> bool:
        """Whether a tensor has a `grad` that nobody else holds, nor its memory. False for loops that cannot own."""
        return False

    def own(self, values: list[torch.Tensor], index: int) -> torch.Tensor:
        """Part a value from all others that hold it or its memory: they keep its numbers in a copy. Return the value."""
        return values[index]

    def own_all(self, values: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Part all values from others that hold them, each `grad` of a tensor included. Return what they hold, by index."""
        for tensor, value in zip(self._tensors, values, strict=True):
            if tensor.grad is value:
                tensor.grad = value.clone(memory_format=torch.preserve_format)
        return {}


def why_not_compiled() -> str | None:
    """Why the compiled loops are not used, and the remedy; None if they are used.

    Raises UsageError if FASTPS_TENSOR_LOOPS is none of "auto", "attributes" and "build", or if a build that it asks for fails.
    """
    return _chosen()[1]


def _chosen() -> tuple[ModuleType | None, str | None]:
    """The module with the compiled loops, or None and the reason."""
    wanted = value_of("FASTPS_TENSOR_LOOPS")
    if wanted == "attributes":
        return None, "loops over Python's attributes, because FASTPS_TENSOR_LOOPS says so"
    if _installed is not None and _installed.BUILT_FOR == TORCH:
        return _installed, None
    module = _from_cache(wanted == "build")
    if module is not None:
        return module, None
    advice = "FASTPS_TENSOR_LOOPS=build fastps doctor builds them for this torch, once, with a C++ compiler; steps are faster"
    fault = _fault if _installed is None else f"the compiled loops are for torch {_installed.BUILT_FOR}, and this is {TORCH}"
    return None, f"loops over Python's attributes, because {fault}: {advice}"


@functools.cache
def _from_cache(builds: bool) -> ModuleType | None:
    """The module from the cache folder, looked for once a process. Raises UsageError if a build fails."""
    return built_loops.load() or (built_loops.build() if builds else None)


@functools.cache
def _say_once(why: str) -> None:
    logger.info("torch %s: %s", torch.__version__, why)


def copier_into(values: list[torch.Tensor]) -> Callable[[list[torch.Tensor]], bool] | None:
    """A function that copies tensors into these values, one each; None if this installation has no fast one.

    It looks at each tensor anew, and returns False if one is not in this process's memory, or of another type, shape or stride.
    """
    module, _ = _chosen()
    return module.Values(values, None).take if module is not None else None


def tensor_loops(tensors: Sequence[Any], uncounted: Collection[int] = ()) -> TensorLoops:
    """Make the fastest loops over these tensors that this installation has. Raises UsageError, as `why_not_compiled` does.

    uncounted: the indices of tensors of which `changed` finds only moves, and no writes.

    >>> parameter = torch.nn.Parameter(torch.zeros(2))
    >>> loops = tensor_loops([parameter])
    >>> loops.show(loops.prepare([torch.ones(2)]))
    >>> parameter.tolist(), loops.changed()
    ([1.0, 1.0], -1)
    """
    module, why = _chosen()
    if module is None:
        _say_once(str(why))
        return TensorLoops(list(tensors), uncounted)
    loops: TensorLoops = module.CompiledLoops(list(tensors), uncounted)
    return loops
