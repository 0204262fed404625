"""Messages between nodes: what is packed comes out again; what another node says is within its range, or refused by name."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastps.errors import ProtocolError
from fastps.job.update_rules import SGD, Hyper, RMSProp, Rule
from fastps.network.messages import HEADER_BYTES, Header, Kind, check_push, hello_fault
from fastps.network.sums import Terms, pack, payload_bytes, unpack


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


GROUPS, PARAMETERS = 2, 70
RULE = SGD(0.1, momentum=0.9).rule
GOOD = pack(Terms([Hyper(0.1, flags=3)] * GROUPS, np.ones(PARAMETERS, np.bool_)))
LAYOUT = bytes(range(32))


@given(st.sampled_from(Kind), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32))
def test_only_a_hello_of_this_layout_is_one(kind: Kind, weight: int, layout: bytes) -> None:
    fault = hello_fault(Header(kind, weight=weight, layout=layout), LAYOUT)
    assert fault.startswith(("expected a HELLO", "node 0 was given no secret"))
    assert hello_fault(Header(Kind.HELLO, weight=3, layout=LAYOUT), LAYOUT) == ""
    assert "found another layout" in hello_fault(Header(Kind.HELLO, weight=3), LAYOUT)
    assert "found 0" in hello_fault(Header(Kind.HELLO, layout=LAYOUT), LAYOUT)


@pytest.mark.parametrize("fields", [{"weight": 0}, {"weight": 2**32 - 1}, {"samples": -1}, {"samples": 2**62}])
def test_numbers_of_a_push_beyond_their_range_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(ProtocolError, match="expected a sum"):
        check_push(Header(Kind.PUSH, **{"weight": 1, **fields}))  # type: ignore[arg-type]
    check_push(Header(Kind.PUSH, weight=4, samples=128))


@pytest.mark.parametrize(("column", "value", "message"), [
    (0, np.nan, "expected a finite learning_rate in group 1, found nan"),
    (3, np.inf, "expected a finite weight_decay in group 1, found inf"),
    (8, np.nan, "expected a finite flags"),
    (8, -1.0, "expected flags from 0"),
    (8, 0.5, "expected flags from 0"),
    (8, 1e300, "expected flags from 0"),
])  # fmt: skip
def test_hyper_parameters_that_no_optimizer_has_are_refused(column: int, value: float, message: str) -> None:
    unpack(GOOD, RULE, GROUPS, PARAMETERS)
    words = np.frombuffer(GOOD, np.float64, len(Hyper._fields) * GROUPS).copy()
    words[len(Hyper._fields) + column] = value
    with pytest.raises(ProtocolError, match=message):
        unpack(words.tobytes() + GOOD[words.nbytes :], RULE, GROUPS, PARAMETERS)


@pytest.mark.parametrize(("rule", "hyper", "needed"), [
    (SGD(0.1).rule, SGD(0.1, momentum=0.9).hyper, 1),
    (RMSProp().rule, RMSProp(momentum=0.9).hyper, 2),
    (RMSProp(momentum=0.9).rule, RMSProp(centered=True).hyper, 3),
])  # fmt: skip
def test_hyper_parameters_that_need_more_state_than_the_job_has_are_refused(rule: Rule, hyper: Hyper, needed: int) -> None:
    """Such a push would fail the fold, and with it the job on all nodes."""
    data = pack(Terms([hyper], np.ones(PARAMETERS, np.bool_)))
    with pytest.raises(ProtocolError, match=f"found some that need {needed}: build the same optimizer"):
        unpack(data, rule, 1, PARAMETERS)
    unpack(data, RMSProp(momentum=0.9, centered=True).rule, 1, PARAMETERS)


def test_bits_of_parameters_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ProtocolError, match="bits for 70 parameters"):
        unpack(GOOD[:-1] + b"\x80", RULE, GROUPS, PARAMETERS)


@given(st.binary(min_size=payload_bytes(GROUPS, PARAMETERS), max_size=payload_bytes(GROUPS, PARAMETERS)))
def test_what_passes_can_be_unpacked(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        unpack(data, RULE, GROUPS, PARAMETERS)


@given(at=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_damaged_terms_are_refused_or_unpacked(at: int, value: int) -> None:
    data = bytearray(GOOD)
    data[at] = value
    with contextlib.suppress(ProtocolError):
        assert unpack(bytes(data), RULE, GROUPS, PARAMETERS).hypers[0].flags >= 0
