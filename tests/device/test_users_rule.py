"""Users' rules where shards are on devices: whole jobs with the bits of the CPU, and refusals by name."""

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pytest

import fastps
from fastps.device import users_rule
from fastps.device.cuda import CudaDevice
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import Rule
from fastps.kernels.shm.arena import LANE_FREE, LANE_LIVE
from fastps.lab.gpus.cuda_on_host import HostCuda, HostDevice
from tests.device.test_device import assert_equal
from tests.device.test_several_devices import make_store, on_cpu, run
from tests.support import twins

pytestmark = pytest.mark.skipif(twins.COMPILER is None, reason="a C compiler is not installed")
GPUS = ("gpu 0", "gpu 1")


@pytest.fixture
def device() -> Any:
    made = HostDevice("host", compile_rule=twins.compiled)
    yield made
    made.shut()


def layout_of(rule: Rule) -> Layout:
    return Layout(place([("w", (4,), (1,), 0)]), 1, rule, parse_policy("bsp"), 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sign_sgd", "slowing"])
def test_a_job_on_two_devices_has_the_bits_of_the_cpu(name: str) -> None:
    update = twins.RULES[name]()
    found = run(make_store(update, "bsp,ema=0.9", GPUS), GPUS, 6, compile_rule=twins.compiled)
    assert_equal(found, on_cpu(update, "bsp,ema=0.9", 2, 6))


def test_a_worker_compiles_what_it_needs_before_it_attaches() -> None:
    """Else the others would wait for the compiler, some of them for a shard lock."""
    prepared: list[tuple[str, int]] = []

    class Watched(HostCuda):
        def prepare(self, device: int, kernels: Sequence[str], users: str) -> None:
            prepared.extend((kernel, store.arena.lane_state(0)) for kernel in kernels)

    with make_store(fastps.Adam(lr=0.1), "bsp", ("gpu 0",), shards=2, dtype="float16") as store:
        api = Watched(["gpu 0"])
        with store.use(CudaDevice(0, api)).attach(0) as worker:
            assert store.arena.lane_state(0) == LANE_LIVE
            worker.wait_for_others()
    api.end()
    assert prepared == [(name, LANE_FREE) for name in ("fps_check_float16", "fps_copy", "fps_fold_adam_float16")]


@pytest.mark.slow
def test_a_text_that_computes_something_else_is_refused_with_an_example(device: HostDevice) -> None:
    rule = twins.slowing()
    wrong = replace(rule, cuda=rule.cuda.replace("sqrtf(square)", "square"))
    with pytest.raises(fastps.UsageError, match=r"rule 'slowing': expected cuda= to .* found weight .* from weight"):
        users_rule.prepare(device, layout_of(wrong), [twins.RULES["slowing"]().hyper])
    users_rule.prepare(device, layout_of(rule), [twins.RULES["slowing"]().hyper])


@pytest.mark.slow
def test_a_rule_without_a_text_or_with_sums_is_refused(device: HostDevice) -> None:
    with pytest.raises(fastps.UnsupportedError, match=r"expected rule 'plain' in C, too.*found no cuda="):
        users_rule.prepare(device, layout_of(replace(twins.plain(), cuda="")), [])

    def squares(weight: Any, gradient: Any, learning_rate: Any) -> Any:
        return weight * weight

    def scaled(weight: Any, gradient: Any, learning_rate: Any, total: Any) -> Any:
        return weight - learning_rate * total * gradient

    summing = fastps.rule(sums=squares)(scaled)
    with pytest.raises(fastps.UnsupportedError, match="rule 'scaled' reads sums"):
        users_rule.prepare(device, layout_of(summing), [])
    with pytest.raises(ValueError, match="expected no cuda= beside sums="):
        fastps.rule(sums=squares, cuda="weight = 0;")(scaled)


@pytest.mark.slow
def test_workers_with_other_texts_have_other_rules_and_a_text_is_pickled() -> None:
    def own(weight: Any, gradient: Any, learning_rate: Any) -> Any:
        return weight - learning_rate * gradient

    made = [fastps.rule(cuda=text)(own) for text in ("", "weight -= learning_rate * gradient;", "weight -= gradient;")]
    assert len({each.digest for each in made}) == 3
    again = pickle.loads(cloudpickle.dumps(twins.plain()))
    assert again.cuda == twins.plain().cuda and again.digest == twins.plain().digest
    weights, plain = [np.ones(3, np.float32), [], np.ones(3, np.float32), [0.1], 0.1, 0], twins.plain()
    assert np.array_equal(again.reference(*weights)[0], plain.reference(*weights)[0])
