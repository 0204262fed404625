"""One attribute of many objects: the same effect as the interpreter's own access, also where that is not a C descriptor's.

C descriptors are those of tensors, whose loops by attributes tests/torch/test_tensor_loops.py tests.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastps.kernels.tensors.attributes import Attribute


class Wary:
    """Its attributes are its own code's business."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "x":
            self.seen.append(value)
        object.__setattr__(self, name, value)


def test_types_with_ways_of_their_own_and_mixed_ones_are_asked_as_usual() -> None:
    wary = [Wary(), Wary()]
    Attribute("x", wary).set(wary, [1, 2])
    assert [each.seen for each in wary] == [[1], [2]]
    mixed: list[Any] = [torch.nn.Parameter(torch.zeros(1)), SimpleNamespace(grad=7)]
    assert Attribute("grad", mixed).get(mixed) == [None, 7]
    with pytest.raises(AttributeError):
        Attribute("_version", mixed[:1]).set_all(mixed[:1], 0)
