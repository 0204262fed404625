"""Specs, options, variables and descriptions that somebody wrote: each is accepted, or refused by an error of fastps."""

import contextlib
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from hypothesis import strategies as st

import fastps
from fastps.checkpoint.periodic import Checkpointing
from fastps.device.placement import bucket_bytes, gpu_variables, gpus_of_workers, parse_gpus, placement
from fastps.errors import Error
from fastps.job import environment, launchers, limits
from fastps.job.disciplines import DISCIPLINES
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Description, first_difference
from fastps.job.nodes import address, nodes_of_environment
from fastps.job.options import OPTIONS, value_of
from fastps.job.specs import MODIFIERS, parse_policies, parse_policy
from fastps.lab.live_faults import FaultPlan
from fastps.lab.stragglers import parse_points
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.processes.hosts import HostsOptions
from fastps.telemetry.prometheus import parse_address
from tests.fuzz.amount import fuzz
from tests.support.variables import VARIABLES

_NUMBERS = st.one_of(
    st.sampled_from(
        ["0", "1", "2", "-1", "0.5", "1e300", "inf", "nan", "1" * 30, "9" * 5000, "1_0", "²", "٣", "0x10", "+3", " 3 "]
    ),
    st.integers(-5, 1 << 70).map(str),
    st.floats().map(str),
)
_WORDS = st.sampled_from([*DISCIPLINES, *MODIFIERS, "true", "one", "kill", "stop", "worker", "..", "(x", *",:=/@-)[]'\""])
_TEXTS = st.lists(st.one_of(_NUMBERS, _WORDS, st.text(max_size=5)), max_size=10).map("".join)
_NAMES = ["kill:", "stop:", "seconds:", "constant:", "normal:", "lognormal:", "pareto:", "replay:", "ms", "us", "s", ","]
_OPTIONS = st.lists(st.one_of(st.sampled_from(_NAMES), _NUMBERS, _TEXTS), max_size=6).map("".join)
_SPECS = st.one_of(
    _TEXTS,
    st.builds(
        lambda name, numbers, changes: f"{name}:{','.join([*numbers, *(f'{key}={value}' for key, value in changes)])}",
        st.sampled_from(list(DISCIPLINES)),
        st.lists(_NUMBERS, max_size=3),
        st.lists(st.tuples(st.sampled_from([*MODIFIERS, "low", "high", "c", "f"]), st.one_of(_NUMBERS, _TEXTS)), max_size=3),
    ),
)
_VALUES = st.one_of(_NUMBERS, _TEXTS, st.binary(max_size=100).map(os.fsdecode)).map(
    lambda text: text.replace("\0", "").replace("\ud800", "")
)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Any:
    before = dict(os.environ)
    os.environ.clear()
    for name, value in variables.items():
        with contextlib.suppress(UnicodeEncodeError):  # no environment can hold a lone surrogate
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _refused(call: Callable[[], object]) -> bool:
    """Whether a call raises an error of fastps. Any other exception fails the test."""
    try:
        call()
    except Error:
        return True
    return False


def test_any_spec_is_a_policy_or_refused() -> None:
    def check(data: st.DataObject) -> None:
        text = data.draw(_SPECS)
        _refused(lambda: parse_policies(text))
        if _refused(lambda: parse_policy(text)):
            return
        policy = parse_policy(text)
        assert parse_policy(policy.spec).values(4) == policy.values(4) if not _refused(lambda: policy.values(4)) else True
        if policy.warm_up or policy.shards > 64:
            return

        def create() -> None:
            with fastps.Store.create({"w": np.zeros(4, np.float32)}, fastps.SGD(lr=1.0), sync=policy, workers=2):
                pass

        _refused(create)

    fuzz("specs", check)


def test_any_text_of_an_option_is_taken_or_refused() -> None:
    def check(data: st.DataObject) -> None:
        text = data.draw(_OPTIONS)
        for parse in (parse_points, parse_gpus, parse_address, parse_compute, address, FaultPlan.parse):
            _refused(lambda parse=parse: parse(text))  # type: ignore[misc]
        _refused(lambda: HostsOptions.of(text, data.draw(_TEXTS)))
        _refused(lambda: launchers.tasks_of_nodes(text))
        launchers.first_host(text)
        launchers.port_of(text, data.draw(_TEXTS))

    fuzz("texts of options", check)


def test_any_environment_is_read_or_refused() -> None:
    readers: list[Callable[[], object]] = [
        *(environment.identity, environment.rank, environment.world_size, environment.joins, limits.timeout_s, limits.stall_ns),
        *(partial(value_of, variable) for variable in OPTIONS),
        *(FaultPolicy.of, lambda: Checkpointing.wanted(None, None), placement, bucket_bytes, gpus_of_workers),
        *(lambda: gpu_variables(1, os.environ), nodes_of_environment, launchers.launched, launchers.launcher_place),
    ]

    def check(data: st.DataObject) -> None:
        with _environment(data.draw(st.dictionaries(st.sampled_from(VARIABLES), _VALUES, max_size=8))):
            for read in readers:
                _refused(read)

    fuzz("environment", check)


def test_any_description_of_a_job_is_compared_and_read_or_refused() -> None:
    with fastps.Store.create({"w": np.zeros(4, np.float32)}, fastps.SGD(lr=1.0)) as store:
        own = store.layout.text()
    leaves = st.one_of(st.none(), st.integers(-3, 1 << 70), st.floats(), st.text(max_size=3))
    values = st.one_of(leaves, st.lists(leaves, max_size=3), st.dictionaries(st.text(max_size=3), leaves, max_size=2))

    def check(data: st.DataObject) -> None:
        described = json.loads(own)
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.sampled_from([described, described["parameters"][0]]))
            if key := data.draw(st.sampled_from(sorted(set(at) - {"parameters"}))):
                at[key] = data.draw(values)
        described["parameters"] = data.draw(st.one_of(st.just(described["parameters"]), values))
        text = data.draw(st.sampled_from([json.dumps(described), "[" * 100_000, data.draw(_TEXTS)]))
        assert isinstance(first_difference(own, text), str)
        with contextlib.suppress(ValueError):
            Description.of(text)

    fuzz("descriptions of jobs", check)
