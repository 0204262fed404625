"""Codecs: the size and the error of one message, and values that are not finite."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.job.wire import BLOCK_FLOATS, wire_bytes
from fastps.network.codec import CODECS, Codec

ROUNDED = {name: codec for name, codec in CODECS.items() if codec is not None}
RELATIVE = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
EACH = pytest.mark.parametrize("name", list(ROUNDED))


def _sent(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    data = np.zeros(wire_bytes(codec.link_dtype, len(values)), np.uint8)
    codec.encode(values, data)
    found = torch.full_like(values, 7.0)
    codec.decode(data, found)
    return found


@EACH
@settings(deadline=None, max_examples=40)
@given(lines=st.integers(1, 70), seed=st.integers(0, 99), size=st.sampled_from([1e-4, 1.0, 100.0]))
def test_a_message_is_off_by_half_a_step_at_most(name: str, lines: int, seed: int, size: float) -> None:
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(16 * lines).astype(np.float32)) * size
    found = _sent(ROUNDED[name], values)
    off = (found - values).abs()
    if name == "int8":
        for first in range(0, len(values), BLOCK_FLOATS):
            block = slice(first, first + BLOCK_FLOATS)
            assert float(off[block].max()) <= float(values[block].abs().max()) / 127 * 0.501
    else:
        assert bool((off <= values.abs() * RELATIVE[name] + 6e-8).all())


@EACH
def test_zeros_stay_zeros_and_what_is_not_finite_stays_so(name: str) -> None:
    codec = ROUNDED[name]
    assert bool((_sent(codec, torch.zeros(272)) == 0).all())
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(272)
        values[5] = bad
        assert not bool(torch.isfinite(_sent(codec, values)).all())
