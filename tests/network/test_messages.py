"""Headers between nodes: what is packed comes out again, and other bytes are refused with a sentence."""

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import ProtocolError
from fastps.network.messages import HEADER_BYTES, Header, Kind


@given(
    kind=st.sampled_from(Kind), weight=st.integers(0, 2**32 - 1), samples=st.integers(-(2**63), 2**63 - 1), loss=st.floats(),
    layout=st.binary(min_size=32, max_size=32), text=st.text(max_size=60), beat=st.binary(max_size=200),
    sent_ns=st.integers(-(2**63), 2**63 - 1),
)  # fmt: skip
def test_a_header_is_what_was_packed(**fields: object) -> None:
    header = Header(**fields)  # type: ignore[arg-type]
    packed = header.pack()
    found = Header.unpack(packed)
    assert len(packed) == HEADER_BYTES
    assert found.pack() == packed
    numbers = lambda each: (each.kind, each.samples, each.weight, each.sent_ns)  # noqa: E731
    assert numbers(found) == numbers(header)
    assert (found.text, found.beat) == (("", header.beat) if header.kind == Kind.BEAT else (header.text, b""))
    assert found.loss == header.loss or math.isnan(header.loss)


def test_a_long_text_is_cut_where_the_header_ends() -> None:
    found = Header.unpack(Header(Kind.FAILED, text="ä" * 1000).pack())
    assert 100 < len(found.text) < 400
    assert set(found.text) <= {"ä", "\N{REPLACEMENT CHARACTER}"}


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="expected a message"):
        Header.unpack(data)


@given(at=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_read_and_never_more(at: int, value: int) -> None:
    packed = bytearray(Header(Kind.PUSH, weight=2, text="text").pack())
    packed[at] = value
    with contextlib.suppress(ProtocolError):
        assert Header.unpack(bytes(packed)).kind in Kind
