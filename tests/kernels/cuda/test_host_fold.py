"""The GPU's kernels as the host compiles them, bit for bit against the fold's oracle; and that a CUDA compiler takes them.

The same rows, situations and sizes as the CPU's fold (fold_jobs.py). Where NVRTC is found, the source is compiled for sm_80 and
sm_90; nothing here needs a GPU.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.kernels.cuda import host_fold, launch_args
from fastps.kernels.cuda import runtime as cuda
from fastps.kernels.update import fold
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM, RULE_ADAM, RULE_SGD, RULE_SUMMING
from tests.kernels.update.test_fold import DECAYS
from tests.support.folds import fold_jobs
from tests.support.folds import fold_reference as reference
from tests.support.folds.fold_jobs import MODES, ROWS, SGD_ROWS, SITUATIONS, SIZES, Job, Result, Row, assert_same_bits, make_job

DTYPES = pytest.mark.parametrize("dtype", list(launch_args.DTYPES))
ADAM = next(row for row in fold_jobs.ALL_ROWS if row.rule == RULE_ADAM)
LONG = (4095, 4096, 4097, 9001)  # around a tile's border


def narrowed(values: Any, dtype: str) -> Any:
    """The gradient as it lies on a device: float32, or the 16 bits of a half or a bfloat16 (truncated: any bits will do)."""
    values = np.ascontiguousarray(values, np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values if dtype == "float32" else values.astype(np.float16)


def widened(values: Any, dtype: str) -> Any:
    """What such a gradient means, in float32."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def aligned(values: Any) -> Any:
    """A copy that begins on 16 bytes, as device memory does."""
    values = np.ascontiguousarray(values)
    room = np.zeros(values.nbytes + 64, np.uint8)
    skip = -room.ctypes.data % 64
    copy = room[skip : skip + values.nbytes].view(values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def launch_on_host(kernel: str, what: launch_args.Launch) -> None:
    host_fold.launch(kernel, what.argument, what.blocks)


def fold_on_device(
    job: Job, mode: int, dtype: str, nonfinite: Any = None, halves: Any = None, shown: str = "float16", *,
    launch: Callable[[str, launch_args.Launch], None] = launch_on_host,
) -> tuple[Result, list[Any]]:  # fmt: skip
    """The job's result by the kernel, and the gradients that it read, in float32.

    The kernel sets `nonfinite` (int32[1]), and writes `halves` (uint16[weights]) in the type `shown`.
    """
    decay = job.ema_decay or 0.0
    shape = launch_args.Shape(job.row.rule, len(job.state), decay, tuple(job.segments), shown)
    gradients = [aligned(narrowed(push[0], dtype)) for push in job.pushes]
    pushes = [
        launch_args.DevicePush(gradient.ctypes.data, push[1], np.array(push[2], np.bool_), *push[3:])
        for gradient, push in zip(gradients, job.pushes, strict=True)
    ]
    weights, state = aligned(job.weights), aligned(job.state)
    weights_out, state_out = aligned(np.zeros_like(weights)), aligned(np.zeros_like(state))
    addresses = [each.ctypes.data for each in (weights, weights_out, state, state_out)]
    buffers = launch_args.Buffers(*addresses, len(weights), halves.ctypes.data if halves is not None else 0)
    tiles, flag = aligned(launch_args.tiles_of(shape)), nonfinite.ctypes.data if nonfinite is not None else 0
    launches, steps = launch_args.make_launches(
        shape, mode, pushes, job.steps, buffers, tiles.ctypes.data, factors=(job.scale, job.rate_scale), nonfinite=flag
    )
    for each in launches:
        launch(launch_args.fold_kernel(job.row.rule, dtype), each)
    return (weights_out, state_out, steps), [widened(gradient, dtype) for gradient in gradients]


def fold_by_reference(job: Job, mode: int, gradients: list[Any], fold: Callable[..., Any] = reference.fold) -> Result:
    job = replace(job, pushes=[(gradient, *push[1:]) for gradient, push in zip(gradients, job.pushes, strict=True)])
    found: Result = fold(job.row.rule, mode, *job.measures(), **job.options())
    return found


def assert_is_the_references(job: Job, mode: int, dtype: str, context: object = None) -> None:
    found, gradients = fold_on_device(job, mode, dtype)
    with np.errstate(all="ignore"):
        assert_same_bits(found, fold_by_reference(job, mode, gradients), (dtype, context))


@pytest.mark.sampled(8)
@MODES
@pytest.mark.parametrize(("row", "dtype"), [
    *((row, "float32") for row in fold_jobs.ALL_ROWS),
    *((row, dtype) for row in fold_jobs.SOME_ROWS for dtype in ("float16", "bfloat16")),
])  # fmt: skip
def test_every_rule_dtype_and_situation_has_the_bits_of_the_reference(row: Row, mode: int, dtype: str) -> None:
    for seed, situation in enumerate(SITUATIONS):
        assert_is_the_references(make_job(row, 1 + seed % 5, situation, seed, SIZES), mode, dtype, situation)


@pytest.mark.sampled(4)
@MODES
@ROWS
def test_the_moving_average_has_the_bits_of_the_reference(row: Row, mode: int) -> None:
    for seed, situation in enumerate(SITUATIONS):
        job = fold_jobs.with_average(make_job(row, 3, situation, seed, SIZES[:5]), DECAYS[seed % len(DECAYS)] or 0.1)
        assert_is_the_references(job, mode, "float32", situation)


@pytest.mark.parametrize("row", [SGD_ROWS[3], fold_jobs.ALL_ROWS[9]], ids=lambda row: row.name)
def test_parameters_longer_than_a_tile_are_folded_whole(row: Row) -> None:
    for pushes in (1, 2, 5):
        assert_is_the_references(make_job(row, pushes, "in_all", pushes, LONG), FOLD_SUM, "float32")


@pytest.mark.parametrize(("mode", "parameters", "pushes", "launches"), [
    (FOLD_SUM, 1, 243, 1), (FOLD_SUM, 2000, 3, 4), (FOLD_EACH, 1, 60, 2), (FOLD_EACH, 300, 20, 2),
    (FOLD_EACH, 3, 120, 8),
])  # fmt: skip
@pytest.mark.sampled(2)
def test_a_fold_that_is_larger_than_a_launch_takes_is_several_launches(
    mode: int, parameters: int, pushes: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes 4,096 bytes of a kernel's parameters (the programming guide's `__global__` function parameters)."""
    launched, launch = [], host_fold.launch

    def counted(kernel: str, argument: Any, blocks: int) -> None:
        launched.append(argument.nbytes)
        launch(kernel, argument, blocks)

    monkeypatch.setattr(host_fold, "launch", counted)
    job = fold_jobs.with_average(make_job(ADAM, pushes, "absent_in_one", 1, [3] * parameters), 0.9)
    job.steps[:] = 7
    assert_is_the_references(job, mode, "float32")
    assert launched == [4096] * launches


def test_a_sum_of_more_pushes_than_a_launch_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a sum of at most 243 pushes, found 244"):
        fold_on_device(make_job(SGD_ROWS[0], 244, "in_all", 1, [3]), FOLD_SUM, "float32")


def test_a_fold_of_no_pushes_copies_everything_even_what_is_not_finite() -> None:
    job = fold_jobs.with_average(make_job(SGD_ROWS[3], 1, "in_all", 3, SIZES[:5]), 0.9)
    job.weights[20], job.state[1][40] = np.inf, np.nan
    empty = Job(job.row, job.segments, [], job.weights, job.state, job.steps, ema_decay=0.9)
    for mode in (FOLD_SUM, FOLD_EACH):
        assert_is_the_references(empty, mode, "float32")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(fold_jobs.any_jobs(st.integers(0, 70), st.none()), st.sampled_from(list(launch_args.DTYPES)))
def test_any_floats_at_all_fold_as_the_reference_folds_them(drawn: tuple[Job, int], dtype: str) -> None:
    with np.errstate(all="ignore"):
        assert_is_the_references(*drawn, dtype)


def test_every_half_and_every_bfloat16_means_what_numpy_says() -> None:
    """All 65,536 of each, as the gradient of a step from 0 with rate -1: the weight is then the gradient, and NaN stays NaN."""
    every = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    hyper = SGD_ROWS[0].hyper._replace(learning_rate=-1.0)
    none, steps, zeros = np.zeros((0, 65536), np.float32), np.zeros(1, np.int64), np.zeros(65536, np.float32)
    for dtype, meant in (("float16", every.view(np.float16).astype(np.float32)), ("bfloat16", widened(every, "bfloat16"))):
        job = Job(SGD_ROWS[0], [(0, 65536, 0)], [(meant, [hyper], [True], 1.0, 1.0)], zeros, none, steps)
        (weights, _, _), gradients = fold_on_device(job, FOLD_SUM, dtype)
        assert np.array_equal(gradients[0], meant, equal_nan=True)
        assert np.array_equal(weights, meant, equal_nan=True)


def flag_of(job: Job, mode: int, dtype: str = "float32") -> int:
    flag = np.zeros(1, np.int32)
    fold_on_device(job, mode, dtype, flag)
    return int(flag[0])


@DTYPES
@MODES
def test_results_that_are_not_finite_set_the_flag(mode: int, dtype: str) -> None:
    for length in (1, 17, 5000):
        for value in (np.inf, -np.inf, np.nan):
            job = make_job(SGD_ROWS[3], 4, "in_all", length, [length])
            assert flag_of(job, mode, dtype) == 0
            job.pushes[2][0][job.segments[0][0] + length - 1] = value
            assert flag_of(job, mode, dtype) == 1


@MODES
def test_a_sum_of_squares_that_overflows_sets_the_flag_although_the_weight_is_finite(mode: int) -> None:
    job = make_job(ADAM, 1, "in_all", 1, [5])
    job.pushes[0][0][job.segments[0][0] + 2] = 1e30
    (weights, _, _), _ = fold_on_device(job, mode, "float32")
    assert np.isfinite(weights).all() and flag_of(job, mode) == 1


@MODES
def test_what_no_push_has_sets_no_flag(mode: int) -> None:
    job = make_job(SGD_ROWS[3], 2, "in_all", 1, [5, 5])
    job.weights[job.segments[1][0]] = np.inf
    absent = [(push[0], push[1], [True, False], *push[3:]) for push in job.pushes]
    job = Job(job.row, job.segments, absent, job.weights, job.state, job.steps)
    assert flag_of(job, mode) == 0
    assert flag_of(Job(job.row, job.segments, [], job.weights, job.state, job.steps), mode) == 0


@pytest.mark.parametrize("shown", ["float16", "bfloat16"])
def test_any_float_is_shown_as_the_half_that_the_cpu_rounds_it_to(shown: str) -> None:
    """The upper halves of all floats, each with lower halves at and around a tie; and whole vectors and single elements."""
    lower = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    bits = (np.arange(65536, dtype=np.uint32)[:, None] << 16 | lower).reshape(-1)
    weights = np.append(bits, np.uint32(0x3F800001)).view(np.float32)
    weights = np.append(weights, np.zeros(-len(weights) % 16, np.float32))
    length = len(weights) - 3
    none, steps = np.zeros((0, len(weights)), np.float32), np.zeros(1, np.int64)
    job = Job(SGD_ROWS[0], [(0, length, 0)], [], weights, none, steps)
    found, expected = aligned(np.zeros(len(weights), np.uint16)), np.zeros(len(weights), np.uint16)
    fold_on_device(job, FOLD_SUM, "float32", halves=found, shown=shown)
    fold.narrow(weights, expected, launch_args.DTYPES[shown])
    assert np.array_equal(found[:length], expected[:length]) and not found[length:].any()


@pytest.mark.sampled(8)
@pytest.mark.parametrize("shown", ["float16", "bfloat16"])
@MODES
@pytest.mark.parametrize("row", fold_jobs.SOME_ROWS, ids=lambda row: row.name)
def test_every_rule_shows_its_new_weights(row: Row, mode: int, shown: str) -> None:
    job = make_job(row, 3, "in_all", 2, (1, 4, 21))
    found = aligned(np.zeros(len(job.weights), np.uint16))
    (weights, _, _), _ = fold_on_device(job, mode, "bfloat16", halves=found, shown=shown)
    expected = np.zeros(len(weights), np.uint16)
    fold.narrow(np.ascontiguousarray(weights), expected, launch_args.DTYPES[shown])
    for offset, length, _ in job.segments:
        assert np.array_equal(found[offset : offset + length], expected[offset : offset + length])


@pytest.mark.parametrize("field", ["state_stride", "weights_in", "weights_out", "state_in", "halves_out"])
def test_a_vector_that_a_gpu_would_not_load_or_store_is_refused(field: str) -> None:
    """As error 716 of CUDA: planes, or a buffer, that do not begin on a multiple of a vector's size."""
    values = aligned(np.zeros(128, np.float32))
    shape = launch_args.Shape(RULE_ADAM, 2, 0.0, ((0, 17, 0),))
    push = launch_args.DevicePush(values.ctypes.data, [ADAM.hyper], np.ones(1, np.bool_))
    buffers = launch_args.Buffers(*[values.ctypes.data] * 4, 32, values.ctypes.data)
    tiles, kernel = aligned(launch_args.tiles_of(shape)), launch_args.fold_kernel(RULE_ADAM, "float32")
    [launch], _ = launch_args.make_launches(shape, FOLD_SUM, [push], np.zeros(1, np.int64), buffers, tiles.ctypes.data)
    host_fold.launch(kernel, launch.argument, 1)
    launch.argument[: launch_args._ARGS.itemsize].view(launch_args._ARGS)[field] += 1 if field == "state_stride" else 4
    with pytest.raises(ValueError, match=r"expected vectors on multiples of their size, .* \(error 716\), found one at 0x"):
        host_fold.launch(kernel, launch.argument, 1)


def test_a_slot_whose_vectors_a_gpu_would_not_load_is_refused() -> None:
    values, tiles = aligned(np.zeros(64, np.float32)), aligned(launch_args.tiles_of_segments([(0, 17)]))
    launch = launch_args.check_launch([(0, 17)], values.ctypes.data + 4, values.ctypes.data, 1, tiles.ctypes.data)
    with pytest.raises(ValueError, match="error 716"):
        host_fold.launch(launch_args.check_kernel("float32"), *launch)


def test_what_no_kernel_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match="or a user's rule without sums, found rule 9"):
        launch_args.Shape(RULE_SUMMING, 1, 0.0, ((0, 4, 0),))
    with pytest.raises(ValueError, match="at most 1 planes of sgd"):
        launch_args.Shape(RULE_SGD, 2, 0.0, ((0, 4, 0),))
    with pytest.raises(ValueError, match="multiple of 16"):
        launch_args.Shape(RULE_SGD, 0, 0.0, ((4, 4, 0),))
    shape = launch_args.Shape(RULE_SGD, 0, 0.0, ((0, 4, 0),))
    push = launch_args.DevicePush(0, [SGD_ROWS[3].hyper], np.ones(1, np.bool_))
    with pytest.raises(ValueError, match="expected the planes"):
        launch_args.make_launches(shape, FOLD_SUM, [push], np.zeros(1, np.int64), launch_args.Buffers(0, 0, 0, 0, 16), 0)
    with pytest.raises(ValueError, match="planes of state a multiple of 16 floats apart, found 17 floats"):
        launch_args.Buffers(0, 0, 0, 0, 17)
    with pytest.raises(ValueError, match="expected state_in on a multiple of 16 bytes, found 0x24"):
        launch_args.Buffers(0, 0, 36, 0, 16)
    with pytest.raises(ValueError, match="expected a gradient on a multiple of 16 bytes, found 0x8"):
        launch_args.DevicePush(8, [], np.ones(1, np.bool_))
    with pytest.raises(ValueError, match=r"a kernel of fps_fold_sgd_float32, .*, fps_copy, found fps_fold_sum_float32"):
        host_fold.launch("fps_fold_sum_float32", np.zeros(4096, np.uint8), 1)


# -- compilers -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_every_kernel(architecture: str) -> None:
    try:
        binary = cuda.compile_with_nvrtc(architecture)
    except cuda.CudaUnavailableError as error:
        pytest.skip(str(error))
    assert all(name.encode() in binary for name in cuda.kernel_names())


def test_asking_for_a_kernel_where_there_is_no_gpu_is_one_clear_sentence() -> None:
    with contextlib.suppress(cuda.CudaUnavailableError):
        cuda.load_cupy()
        pytest.skip("there is a GPU here")
    with pytest.raises(cuda.CudaUnavailableError, match=r"expected (CuPy|a GPU|at least one GPU).*found"):
        cuda.kernel(0, launch_args.fold_kernel(RULE_SGD, "float32"))
