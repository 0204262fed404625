"""One seed is one trace, bit by bit: hashes of traces, written down on x86-64 from a release build.

`make test-debug` runs this file on a debug build, whose compiler optimizes differently. A machine, compiler or change that
makes other bits fails here; a change of the model that means to is the only reason to write a hash down again.
"""

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from fastps.lab.virtual.compute_texts import parse_compute
from tests.support.virtual_runs import played

BURSTS = (2e8, 3e7, 4.0)
MIXED: dict[str, Any] = {
    "workers": 9,
    "steps": 200,
    "model_bytes": 1_234_567,
    "bandwidth": 1.25e9,
    "worker_bandwidth": 4e8,
    "latency_ns": 12_345,
    "late_pushes": (0.01, 7_000_000),
    "seed": 5,
}
BUSY: dict[str, Any] = {"service_ns": 10_007, "service_rate": 3.3e9, "update_ns": 20_011}
SHARED: dict[str, Any] = {"cores": 2.7, "half_duplex": True}
LONG: dict[str, Any] = {"workers": 64, "steps": 50, "seed": 2**63, "model_bytes": 7, "bandwidth": 1.0, "late_pulls": (0.3, 1)}

TRACES = {
    ("bsp", "links"): "c12e13df778c7e8e40f8ac00b413fd3c508fcbfceef27214d5377b3c79afea6b",
    ("bsp", "busy"): "5e54b34e4bc84e778e642caea64955d2d35d7c813d9dbc06502f21bfb837853f",
    ("ssp:2", "links"): "367b4182e8d6657568491dd163d55e3bd232688d56f96306f5cf8fdd3aa1729b",
    ("ssp:2", "busy"): "fa3f5a7be12fbeed1a12780b4b7cbdca3f967ccf67af9b15c994a7a5aa96db21",
    ("dssp:3,15", "links"): "c4d1bafbe39621f2b8c4e756f33f0598a596682aad3b64f984b4289d58b2483e",
    ("dssp:3,15", "busy"): "c82fe2c05b756e32ba92e7e97e1560ed51dbad5dc2995b9e6377ab66d63f58d0",
    ("backup:2", "links"): "d497683ccee0cef8f4932400504b1a5309077cf09c6001562ce5fb2f45a527af",
    ("backup:2", "busy"): "fe2858f3ebb12cf784908d9fe2230f0185aef4e34a8226da26855141a798a777",
    ("psp:6,0.75", "links"): "717b751cd3028ba22e0f6b5e0c435a37fefaf7936fcc0fefd6e4dbfcf5cd847f",
    ("psp:6,0.75", "busy"): "e2e2dcf1c4266b1d5bbc5e88f88696da09b0cdb20bb88562c7a85a854a7e4fa0",
    ("softsync:4", "links"): "a2047bafc352416cb35dc9f25cdd924e1a91038c213aeec4769ef9682a699b3f",
    ("softsync:4", "busy"): "6e6776817691a2e91b0b1119bbc875adeec2a27005597615e5d588852ddfc36f",
    ("adv:2,groups=3", "links"): "f0c0541e788c874e02c15065e65ba4cdd0077a4dc0dcf22b29bfcc5c1624872b",
    ("adv:2,groups=3", "busy"): "5ce28b641d79349571a5d695363a71a4550634a80a65075f13d04dbb51b7bc08",
    ("adv*:2", "links"): "8858a3a5e3d4ccd32c405bb48657bd2894a3e8c76685c9841898c9efa1580137",
    ("adv*:2", "busy"): "1572876be32b67f90bb9d4840e260422d6d0706fef3fcddb03a827c436d3d718",
    ("r2sp:0.8,tune=true", "links"): "4a320452ae5178b9c46565aa1b6a69ad48daf2303b7d3b3ea81d3475b6bf3007",
    ("r2sp:0.8,tune=true", "busy"): "3d225f27a1e2e3da75be56965f7ed91f3bd291387d0af99401630b1f45fed997",
    ("bsp", "cores"): "0a06fb946e6262479f8eb2e9552847bbd3788298c765cd8b8024414247ffee4b",
    ("dssp:3,15", "cores"): "61eaee4eb3416a822bd06b7138734138fcb6cc37aed80d5fd5e8b3298757e90c",
    ("adv*:2", "cores"): "1b4914e84c741893452a27fdfd601bc249cfd0f57ebad76c6209a59d341ad7f8",
    ("r2sp:0.8,tune=true", "cores"): "9aab5b49b5b33632738c62067ea1e7cee40facf7520a975dd5699cdb3c245747",
    ("asp", "long"): "fa48c3a0c1a91e0f521bb45640797c8fc51e3c2d56835b37397b5f919e77c86d",
}


SURROUNDINGS = {"links": MIXED, "busy": {**MIXED, **BUSY}, "cores": {**MIXED, **SHARED}, "long": LONG}


def bits(spec: str, **options: Any) -> bytes:
    trace = played(spec, **options).trace
    assert trace is not None and len(trace) > 1000
    return trace.tobytes()


@pytest.mark.parametrize(("spec", "surroundings"), TRACES)
def test_a_trace_has_the_bits_that_were_written_down(spec: str, surroundings: str) -> None:
    compute = replace(parse_compute("pareto:5ms,2.5"), factors={3: 1.7}, bursts=BURSTS)
    found = bits(spec, **SURROUNDINGS[surroundings], compute=compute)
    assert hashlib.sha256(found).hexdigest() == TRACES[spec, surroundings]


def test_another_seed_has_other_bits() -> None:
    compute = parse_compute("pareto:5ms,2.5")
    assert bits("asp", **MIXED, compute=compute) != bits("asp", **{**MIXED, "seed": 6}, compute=compute)


def test_computing_times_of_every_model_have_the_bits_that_were_written_down() -> None:
    found = hashlib.sha256()
    for model in ("lognormal:10ms,0.3", "normal:10ms,2ms", "pareto:5ms,2.5"):
        found.update(bits("asp", **MIXED, compute=replace(parse_compute(model), bursts=BURSTS)))
    assert found.hexdigest() == "577b8a3d7ffe169a2674d3c2e089b5031046a589287a3a99604df8b01e841e58"
