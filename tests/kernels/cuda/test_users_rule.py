"""A user's rule in the fold's kernels: the text has the bits of Numba's code, and a CUDA compiler takes it without a spill."""

import itertools
import shutil
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fastps.bench.gpu import machine_code
from fastps.kernels.cuda import launch_args, runtime, users_rule
from fastps.kernels.update import fold
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM
from tests.kernels.cuda.test_host_fold import aligned, fold_by_reference, fold_on_device
from tests.support import twins
from tests.support.folds.fold_jobs import Job, Pushes, Row, bits

NEEDS_CC = pytest.mark.skipif(twins.COMPILER is None, reason="a C compiler is not installed")
NEEDS_NVCC = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
SEGMENTS = [(0, 1, 0), (16, 4099, 0), (4128, 37, 0)]
SIZE = 4176


def differ(update: Any, launch: Any, mode: int, dtype: str, ema_decay: float, shown: str) -> list[str]:
    """Fold three pushes, one without a gradient for a parameter, with the kernel and on the CPU; the names of what differs."""
    random, planes = np.random.default_rng(3), len(update.rule.planes)
    weights, state = random.standard_normal(SIZE), random.standard_normal((planes + (ema_decay > 0), SIZE)) ** 2
    row = Row("own", update.rule.number, tuple(update.hyper), torch.optim.SGD, {})
    pushes: Pushes = [
        (random.standard_normal(SIZE).astype(np.float32), [row.hyper], present, scale, 1.0)
        for present, scale in (([True] * 3, 1.0), ([True, False, True], 0.3), ([True] * 3, 1.0))
    ]
    job = Job(
        row, SEGMENTS, pushes, weights.astype(np.float32), state.astype(np.float32), np.array([0, 5, 2], np.int64),
        scale=1 / 3, rate_scale=0.7, ema_decay=ema_decay or None,
    )  # fmt: skip
    halves, flag = aligned(np.zeros(SIZE, np.uint16)), np.zeros(1, np.int32)
    found, gradients = fold_on_device(job, mode, dtype, flag, halves, shown, launch=launch)
    assert flag[0] == 0
    expected = fold_by_reference(job, mode, gradients, partial(fold.fold, user_rule=update.rule.address))
    shown_bits = np.zeros(SIZE, np.uint16)
    fold.narrow(expected[0], shown_bits, launch_args.DTYPES[shown])
    differing = []
    for offset, length, _ in SEGMENTS:
        span = slice(offset, offset + length)
        differing += ["weights"] * (not np.array_equal(bits(found[0][span]), bits(expected[0][span])))
        differing += ["state"] * (not np.array_equal(bits(found[1][:, span]), bits(expected[1][:, span])))
        differing += ["halves"] * (not np.array_equal(halves[span], shown_bits[span]))
    return differing + ["steps"] * (not np.array_equal(found[2], expected[2]))


@pytest.mark.slow
@NEEDS_CC
@pytest.mark.parametrize(
    "name", ["eight", *(pytest.param(name, marks=pytest.mark.slow) for name in twins.RULES if name != "eight")]
)
def test_the_kernel_of_a_rule_has_the_bits_of_numbas_code(name: str) -> None:
    update = twins.RULES[name]()
    launch = twins.compiled(runtime.source(update.rule.device_text()))  # type: ignore[attr-defined]
    for mode in (FOLD_SUM, FOLD_EACH):
        for dtype in launch_args.DTYPES:
            for ema_decay, shown in ((0.0, "float16"), (0.9, "bfloat16")):
                assert differ(update, launch, mode, dtype, ema_decay, shown) == [], (mode, dtype, ema_decay)


@pytest.mark.slow
@NEEDS_CC
def test_another_text_has_other_bits() -> None:
    update = twins.RULES["slowing"]()
    text = update.rule.device_text().replace("1.5f", "1.25f")  # type: ignore[attr-defined]
    launch = twins.compiled(runtime.source(text))
    assert "weights" in differ(update, launch, FOLD_SUM, "float32", 0.0, "float16")


@pytest.mark.slow
@pytest.mark.timeout(600)
@NEEDS_NVCC
@pytest.mark.parametrize(("name", "architecture"), list(zip(twins.RULES, itertools.cycle(["80", "90", "100"]))))
def test_a_cuda_compiler_takes_a_rule_without_spills_and_moves_16_bytes_at_a_time(name: str, architecture: str) -> None:
    text = twins.RULES[name]().rule.device_text()  # type: ignore[attr-defined]
    found = machine_code.resources(f"sm_{architecture}", text)
    assert sorted(found) == sorted(runtime.users_kernel_names())
    assert {each: needs for each, needs in found.items() if needs.stack_bytes or needs.spilled_bytes} == {}
    made = machine_code.instructions(f"compute_{architecture}", text)
    for each in (kernel for kernel in made if kernel.startswith("fps_fold")):
        assert sum(step.startswith("ld.") and ".v4.f32" in step for step in made[each]) >= 1 + (name != "plain"), each
        assert any(step.startswith("st.") and ".v4.f32" in step for step in made[each]), each
        assert not [step for step in made[each] if step.startswith(("atom", "red.", "bar.", "ld.local", "st.local"))], each


@pytest.mark.parametrize(("body", "found"), [
    ("weight = 0.5 * weight;", "0.5"),
    ("weight = weight * 1e-3;", "1e-3"),
    ("weight = .5*weight;", ".5"),
    ("weight = 2. * weight;", "2."),
])  # fmt: skip
def test_a_number_in_double_precision_is_refused(body: str, found: str) -> None:
    with pytest.raises(ValueError, match=r"to end in f, found ") as caught:
        users_rule.check_body("own", body)
    assert f"found {found}:" in str(caught.value)


def test_a_return_is_refused_and_what_only_looks_like_either_is_not() -> None:
    with pytest.raises(ValueError, match="found a return"):
        users_rule.check_body("own", "if (gradient == 0) return weight;")
    users_rule.check_body("own", "/* 0.5, or return */ weight = 2 * weight * 0.5f + 1e-3f + x1.y; // return 0.1\nreturned = 3;")
