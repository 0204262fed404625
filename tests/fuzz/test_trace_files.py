"""A trace may hold anything: reading it raises TraceError, or its readers make something of it."""

import contextlib
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

import fastps
from fastps.advice.replay import simulation_of
from fastps.errors import Error
from fastps.lab.virtual.recorded import recorded_of
from fastps.report.findings import facts_of, findings_of
from fastps.tracing import perfetto
from fastps.tracing.file import MAGIC, TraceError, read
from tests.fuzz.amount import fuzz
from tests.fuzz.damage import damage_file, mutate


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undamaged trace of two workers."""
    file = tmp_path_factory.mktemp("fuzzed") / "run.trace"
    weights = {"w": np.ones(30, np.float32), "b": np.ones(3, np.float32)}
    with (
        fastps.trace(file),
        fastps.Store.create(weights, fastps.SGD(lr=0.1), workers=2, sync="asp") as store,
        store.attach(0) as first,
        store.attach(1) as second,
    ):
        for _ in range(5):
            first.step()
            second.step()
    return file


def _resealed(data: st.DataObject, content: bytes) -> bytes:
    """The trace with another header or other records, and the checksum of these."""
    begin = len(MAGIC) + 8
    end = begin + int.from_bytes(content[len(MAGIC) : begin], "little")
    header, records = json.loads(content[begin:end]), bytearray(content[end:-4])
    if data.draw(st.booleans()):
        mutate(data, header)
    else:
        number = data.draw(st.sampled_from([0, 1, 2, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]))
        place = 8 * data.draw(st.integers(0, len(records) // 8 - 1))
        records[place : place + 8] = number.to_bytes(8, "little")
    text = json.dumps(header).encode()
    made = MAGIC + len(text).to_bytes(8, "little") + text + records
    return made + zlib.crc32(made).to_bytes(4, "little")


def test_a_damaged_trace_is_refused_and_a_strange_one_is_read_or_refused(whole: Path) -> None:
    damaged = whole.with_name("damaged.trace")
    content = whole.read_bytes()

    def check(data: st.DataObject) -> None:
        damaged.unlink(missing_ok=True) if not damaged.is_dir() else damaged.rmdir()
        is_sealed = data.draw(st.booleans())
        damaged.write_bytes(_resealed(data, content) if is_sealed else content)
        if not is_sealed:
            damage_file(data, damaged)
        try:
            trace = read(damaged)
        except TraceError:
            return
        assert is_sealed or damaged.read_bytes() == content
        findings_of(facts_of(trace))
        list(perfetto.events(trace))
        with contextlib.suppress(Error):
            simulation_of(trace)
        with contextlib.suppress(Error):
            recorded_of(trace, damaged)

    fuzz("traces", check)
