"""What travels: sizes and parts are those that the codecs write and that homes are cut into."""

import numpy as np
import pytest
import torch

from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.job.wire import BLOCK_FLOATS, part_count, wire_bytes
from fastps.network.codec import CODECS
from fastps.network.edge import CHUNK_FLOATS
from fastps.network.parts import parts_of


@pytest.mark.parametrize("floats", [4, 252, 256, 260, 1_000_000])
def test_bytes_are_those_that_codecs_write(floats: int) -> None:
    """A codec writes all bytes of its memory, and reads the same values from them."""
    values = torch.linspace(1.0, 2.0, floats)
    for codec in filter(None, CODECS.values()):
        data = np.full(wire_bytes(codec.link_dtype, floats), 255, np.uint8)
        codec.encode(values, data)
        found = torch.zeros(floats)
        codec.decode(data, found)
        assert torch.allclose(found, values, atol=1e-2)


def test_messages_have_the_promised_sizes() -> None:
    sizes = {name: wire_bytes(name, CHUNK_FLOATS) / CHUNK_FLOATS for name in CODECS}
    assert sizes == {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1 + 4 / BLOCK_FLOATS}


@pytest.mark.parametrize("floats", [1, 1_000_000, 1_572_865, 2_500_000, 25_000_000, 100_000_000])
def test_homes_are_cut_into_so_many_parts(floats: int) -> None:
    layout = Layout(place([("w", (floats,), (1,), 0)], 1), 1, SGD(lr=0.1).rule, parse_policy("bsp"), 2)
    assert len(parts_of(layout)) == part_count(layout.buffer_floats)
