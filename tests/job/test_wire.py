"""What travels: sizes and parts are those that the codecs write and that homes are cut into."""

import pytest

from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.job.wire import part_count, wire_bytes
from fastps.network import codec
from fastps.network.parts import parts_of


@pytest.mark.parametrize("floats", [1, 255, 256, 257, 1_000_000])
def test_bytes_are_those_that_codecs_write(floats: int) -> None:
    for name, each in codec.CODECS.items():
        assert wire_bytes(name, floats) == (4 * floats if each is None else each.wire_bytes(floats))


@pytest.mark.parametrize("floats", [1, 1_000_000, 1_572_865, 2_500_000, 25_000_000, 100_000_000])
def test_homes_are_cut_into_so_many_parts(floats: int) -> None:
    layout = Layout(place([("w", (floats,), (1,), 0)], 1), 1, SGD(lr=0.1).rule, parse_policy("bsp"), 2)
    assert len(parts_of(layout)) == part_count(layout.buffer_floats)
