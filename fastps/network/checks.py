"""Checks of what another node says, made before it has any effect. A layout that both sides know gives all sizes."""

import math

import numpy as np

from fastps.errors import ProtocolError
from fastps.job.update_rules import Hyper, Rule
from fastps.kernels.update import fold
from fastps.network.messages import Header, Kind
from fastps.network.secret import HOW_TO_GIVE

MOST_GRADIENTS = 1 << 20  # in one sum of a node
MOST_SAMPLES = 1 << 48  # in one sum of a node
_FLAGS_END = 1 << 31


def hello_fault(hello: Header, layout: bytes) -> str:
    """Why the first message over an edge is no HELLO of this job; empty if it is one.

    >>> hello_fault(Header(Kind.HELLO, weight=2), bytes(32))
    ''
    """
    if hello.kind == Kind.CHALLENGE:
        return f"node 0 was given no secret, and this node has one: {HOW_TO_GIVE}"
    if hello.kind != Kind.HELLO:
        return f"expected a HELLO, found {hello.kind.name}"
    if hello.layout != layout:
        return "expected a HELLO of this job's layout, found another layout: build the same model, optimizer and discipline"
    if not 1 <= hello.weight <= MOST_GRADIENTS:
        return f"expected a HELLO of 1 to {MOST_GRADIENTS} workers, found {hello.weight}"
    return ""


def check_push(header: Header) -> None:
    """Check the numbers of a PUSH. Raises ProtocolError."""
    if not 1 <= header.weight <= MOST_GRADIENTS:
        raise ProtocolError(f"expected a sum of 1 to {MOST_GRADIENTS} gradients, found {header.weight}")
    if not 0 <= header.samples <= MOST_SAMPLES:
        raise ProtocolError(f"expected a sum over 0 to {MOST_SAMPLES} samples, found {header.samples}")


def check_terms(data: bytes, rule: Rule, groups: int, parameters: int) -> None:
    """Check the hyper-parameters and the presence bits that come before a sum's floats. Raises ProtocolError.

    A fold fails, and ends the job on all nodes, if the hyper-parameters need state that the job's rule does not have.
    """
    fields = len(Hyper._fields)
    words = np.frombuffer(data, np.float64, fields * groups).reshape(groups, fields)
    for group, row in enumerate(words.tolist()):
        for name, value in zip(Hyper._fields, row, strict=True):
            if not math.isfinite(value):
                raise ProtocolError(f"expected a finite {name} in group {group}, found {value}")
        if not (0 <= row[-1] < _FLAGS_END and row[-1].is_integer()):
            raise ProtocolError(f"expected flags from 0 to {_FLAGS_END - 1} in group {group}, found {row[-1]:g}")
        needed = fold.planes_needed(rule.number, tuple(row))
        if needed > len(rule.planes):
            raise ProtocolError(
                f"expected hyper-parameters of {rule.name} with {len(rule.planes)} tensors of state in group {group}, found"
                f" some that need {needed}: build the same optimizer on all nodes, and keep its options"
            )
    bits = np.frombuffer(data, np.uint8, offset=8 * fields * groups)
    if np.unpackbits(bits, bitorder="little")[parameters:].any():
        raise ProtocolError(f"expected bits for {parameters} parameters, found bits beyond them")
