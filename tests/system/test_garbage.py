"""The collector's objects are found after gc.freeze, too: layers with sparse gradients, and wrappers that average gradients."""

import gc
import weakref

import torch

from fastps.system import garbage
from fastps.torch import foreign, names


def test_what_a_program_froze_is_found_and_stays_frozen() -> None:
    mark = [object()]
    gc.freeze()
    assert not any(each is mark for each in gc.get_objects())
    assert any(each is mark for each in garbage.objects())
    assert not any(each is mark for each in gc.get_objects())


def test_garbage_is_not_frozen_by_a_look() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    gc.freeze()
    left = weakref.ref(Cycle())
    garbage.objects()
    assert left() is None


def test_what_fastps_froze_is_not_looked_at() -> None:
    mark = [object()]
    garbage.freeze()
    assert not any(each is mark for each in garbage.objects())


def test_sparse_layer_is_found_after_freeze() -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    gc.freeze()
    mixed = [torch.nn.Parameter(torch.zeros(1)), layer.weight]
    assert foreign.sparse_parameters(mixed, names.around(mixed, None)) == {1}
