"""One attribute of many objects: the same effect as the interpreter's own access, for C descriptors and for everything else."""

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


def _parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.full((2,), float(index))) for index in range(3)]


def test_every_tensor_is_pointed_at_its_own_data() -> None:
    parameters, data = _parameters(), [torch.full((2,), 10.0 + index) for index in range(3)]
    Attribute("data", parameters).set(parameters, data)
    assert [parameter.data_ptr() for parameter in parameters] == [each.data_ptr() for each in data]
    assert [parameter._version for parameter in parameters] == [0, 0, 0], "pointing elsewhere is no write"


def test_the_first_gradient_that_is_another_is_found() -> None:
    parameters, gradients = _parameters(), [torch.zeros(2) for _ in range(3)]
    grad = Attribute("grad", parameters)
    grad.set(parameters, gradients)
    assert grad.are(parameters, gradients) == -1
    parameters[1].grad = torch.zeros(2)  # equal, and not the same
    assert grad.are(parameters, gradients) == 1
    grad.set_all(parameters, None)
    assert [parameter.grad for parameter in parameters] == [None] * 3


def test_version_counters_are_compared_as_numbers() -> None:
    parameters = _parameters()
    counters = Attribute("_version", parameters)
    before = counters.get(parameters)
    with torch.no_grad():
        for _ in range(1000):
            parameters[2].add_(1.0)
    assert counters.are(parameters, before) == 2
    assert counters.are(parameters, [0, 0, 1000]) == -1


def test_what_the_attribute_refuses_is_refused() -> None:
    parameters = _parameters()
    with pytest.raises(TypeError, match="data"):
        Attribute("data", parameters).set(parameters, [1, 2, 3])
    with pytest.raises(AttributeError):
        Attribute("_version", parameters).set_all(parameters, 0)
    with pytest.raises(ValueError, match="expected 3 values, found 1"):
        Attribute("data", parameters).set(parameters, [torch.zeros(2)])


def test_types_with_ways_of_their_own_and_mixed_ones_are_asked_as_usual() -> None:
    wary = [Wary(), Wary()]
    Attribute("x", wary).set(wary, [1, 2])
    assert [each.seen for each in wary] == [[1], [2]]
    mixed: list[Any] = [torch.nn.Parameter(torch.zeros(1)), SimpleNamespace(grad=7)]
    assert Attribute("grad", mixed).get(mixed) == [None, 7]
