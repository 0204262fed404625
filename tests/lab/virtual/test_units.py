"""Times, sizes and rates as people write them."""

from collections.abc import Callable

import pytest

from fastps.errors import UsageError
from fastps.lab.virtual.units import read_bytes, read_ns, read_rate


@pytest.mark.parametrize(("read", "text", "expected"), [
    (read_ns, "10ms", 1e7),
    (read_ns, " 1.5 s ", 1.5e9),
    (read_ns, "2e3us", 2e6),
    (read_bytes, "12", 12.0),
    (read_bytes, "1KiB", 1024.0),
    (read_bytes, "1kB", 1000.0),
    (read_rate, "8Mbit/s", 1e6),
    (read_rate, "1.25GB", 1.25e9),
])  # fmt: skip
def test_a_quantity_is_its_number_times_its_unit(read: Callable[[str, str], float], text: str, expected: float) -> None:
    assert read("--option", text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "10", "ms", "1..2ms", "10 minutes", "-1ms", "1e999s", "1MB"])
def test_what_is_no_time_is_refused_with_the_options_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"--latency: expected a time such as 10ms, with ns, us, ms or s, found "):
        read_ns("--latency", text)


def test_a_size_has_no_bits_and_a_rate_has() -> None:
    with pytest.raises(UsageError, match="--model-bytes: expected a size"):
        read_bytes("--model-bytes", "8Mbit")
    assert read_rate("--bandwidth", "8bit") == 1.0
