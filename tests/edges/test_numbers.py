"""Numbers and names that no job has: each ended in a raw exception of Python or of compiled code."""

import os
import sys

import numpy as np
import pytest

import fastps
from fastps.errors import UsageError
from fastps.job import limits
from fastps.lab.live_faults import FaultPlan
from tests.support.scripts import output

WEIGHTS = {"w": np.zeros(4, np.float32)}


@pytest.mark.parametrize("text", ["inf", "1e300", "1000000001", "nan", "0", "-1", "9" * 5000])
def test_a_timeout_that_no_deadline_can_hold_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_TIMEOUT", text)
    with pytest.raises(UsageError, match="at most 1,000,000,000 seconds"):
        limits.timeout_s()


@pytest.mark.parametrize("samples", [-1, 1 << 32, 1 << 40])
def test_a_number_of_samples_that_no_push_can_carry_is_refused(samples: int) -> None:
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        with pytest.raises(UsageError, match="expected 0 to 4,294,967,295 samples"):
            worker.push(store.hypers, samples=samples)
        worker.step({"w": np.ones(4)})


@pytest.mark.parametrize("workers", [125, 100_000, 1 << 40])
def test_more_workers_than_an_arena_has_buffers_for_are_refused(workers: int) -> None:
    with pytest.raises(fastps.LayoutError, match=f"expected 1 to 124 workers .* found {workers}"):
        fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), workers=workers)


def test_a_job_name_that_no_socket_can_have_is_refused() -> None:
    for name in ("x" * 200, "a\nb", "\ud800"):
        with pytest.raises(UsageError, match="bytes of printable text"):
            fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), job=name)


def test_an_endless_number_of_faults_is_refused() -> None:
    for text in ("kill:inf", "stop:nan", "kill:1e400", "kill:0.5"):
        with pytest.raises(UsageError, match="whole numbers of faults"):
            FaultPlan.parse(text)


def test_an_instruction_set_that_this_machine_lacks_is_named() -> None:
    code = "import fastps\ntry:\n    fastps.SGD\nexcept fastps.UsageError as error:\n    print(error)"
    found = output([sys.executable, "-c", code], env={**os.environ, "FASTPS_ISA": "zzz"})
    assert found.startswith("FASTPS_ISA: expected an instruction set of this machine (")
