"""The collector's objects are found after gc.freeze, too: layers with sparse gradients, and wrappers that average gradients."""

import gc
from collections.abc import Iterator

import pytest
import torch

from fastps.system import garbage
from fastps.torch import foreign


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    yield
    garbage.freeze()


def test_what_a_program_froze_is_found_and_stays_frozen() -> None:
    mark = [object()]
    gc.freeze()
    count = gc.get_freeze_count()
    assert not any(each is mark for each in gc.get_objects())
    assert any(each is mark for each in garbage.objects())
    assert gc.get_freeze_count() >= count


def test_what_fastps_froze_is_not_looked_at() -> None:
    mark = [object()]
    garbage.freeze()
    assert not any(each is mark for each in garbage.objects())


def test_sparse_layer_is_found_after_freeze() -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    gc.freeze()
    assert foreign.sparse_parameters([torch.nn.Parameter(torch.zeros(1)), layer.weight]) == {1}
