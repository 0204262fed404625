"""The precision of a job's numbers: single, with halves where the model has them, or double.

In a double job weights, gradients, optimizer state and the average are all float64. This module says what such a job cannot
have yet.
"""

from collections.abc import Sequence

from fastps.errors import UnsupportedError
from fastps.job.layout import Layout
from fastps.kernels.update import fold


def check_types(types: Sequence[str]) -> None:
    """Raise UnsupportedError for types that no arena holds together: both halves, or float64 beside others.

    >>> check_types(["float32", "bfloat16"])
    """
    found = set(types)
    if {"float16", "bfloat16"} <= found:
        raise UnsupportedError(
            "expected parameters of one half precision beside float32, found bfloat16 and float16: convert the model to one"
        )
    if "float64" in found and len(found) > 1:
        raise UnsupportedError(
            f"expected float64 for all parameters or for none, found {' and '.join(sorted(found))}: use model.double(), or"
            " model.float()"
        )


def check_double(layout: Layout) -> None:
    """Raise UnsupportedError for what a job with float64 parameters cannot have: tables, rules of users, other pushed types."""
    if not any(parameter.type == "float64" for parameter in layout.parameters):
        return
    check_types([parameter.type for parameter in layout.parameters])
    table = next((parameter.name for parameter in layout.parameters if parameter.is_table), None)
    if table is not None:
        raise UnsupportedError(
            f"parameter {table!r}: expected a table (sparse=True) in float32, found float64; use model.float(), or build its"
            " layer with sparse=False"
        )
    if layout.rule.number in (fold.RULE_USER, fold.RULE_SUMMING):
        raise UnsupportedError(
            f"rule {layout.rule.name!r} is compiled for float32: expected float32 parameters, found float64; use model.float(),"
            " or an optimizer of torch.optim"
        )
    if layout.gradient_type != "float64":
        raise UnsupportedError(
            f"expected gradients of float64 parameters to be pushed in float64, found {layout.gradient_type}: leave push_dtype"
            " out"
        )
