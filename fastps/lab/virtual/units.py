"""Parsing of times, sizes and rates with units: 10ms, 100MB, 10Gbit. A time needs a unit."""

import math
import re

from fastps.errors import UsageError

_TIMES_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9}
_BYTES = {"": 1.0, "B": 1.0, "kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_RATES = {**_BYTES, "bit": 1 / 8, "kbit": 1e3 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_QUANTITY = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def read_ns(name: str, text: str) -> float:
    """Parse a time with its unit, in ns. Raises UsageError.

    >>> read_ns("--latency", "50us")
    50000.0
    """
    return _read(name, text, _TIMES_NS, "a time such as 10ms, with ns, us, ms or s")


def read_bytes(name: str, text: str) -> float:
    """Parse a size, in bytes. Raises UsageError.

    >>> read_bytes("--model-bytes", "100MB")
    100000000.0
    """
    return _read(name, text, _BYTES, "a size such as 100MB, with B, kB, MB, GB, KiB, MiB or GiB")


def read_rate(name: str, text: str) -> float:
    """Parse a rate, in bytes per second; "/s" is optional. Raises UsageError.

    >>> read_rate("--bandwidth", "10Gbit/s")
    1250000000.0
    """
    return _read(name, text.removesuffix("/s"), _RATES, "a rate per second such as 10Gbit or 1.25GB, with Mbit, Gbit, MB or GB")


def _read(name: str, text: str, units: dict[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(text)
    try:
        found = float(match[1]) * units[match[2]] if match else math.nan
    except (ValueError, KeyError):
        found = math.nan
    if not math.isfinite(found):
        raise UsageError(f"{name}: expected {expected}, found {text!r}")
    return found
