"""The kernels as NVIDIA's compiler makes them: NVRTC's PTX, run on the CPU, has the bits of the NumPy reference.

It shows where NVRTC's front end fuses, which addresses are used, and alignment. It does not show what ptxas, the order of
memory, streams and CUDA IPC do. It needs NVRTC, which the extra [test] brings, and no GPU.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from fastps.kernels.cuda import host_fold, launch_args, runtime
from fastps.kernels.cuda.launch_args import Launch
from fastps.kernels.update import fold
from fastps.kernels.update.fold import FOLD_EACH, FOLD_SUM
from fastps.lab.worlds import device_chaos
from tests.device.ptx.machine import Memory, Threads
from tests.device.ptx.program import Kernel, kernels_of
from tests.kernels.cuda import test_users_rule
from tests.kernels.cuda.test_host_fold import aligned, fold_by_reference, fold_on_device, narrowed
from tests.support import twins
from tests.support.folds.fold_jobs import ALL_ROWS, SITUATIONS, assert_same_bits, make_job, with_average
from tests.support.sizes import sample_and_full

try:
    runtime._load_nvrtc()
    WHY_NOT = ""
except runtime.CudaUnavailableError as error:
    WHY_NOT = f"{error}; the extra [test] installs it"

pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT), pytest.mark.timeout(300)]  # NVRTC takes 5 s of a core
ARCHITECTURES = ("80", "90", "100")
THREADS = 8  # of a block, so that each thread folds two vectors of a small parameter


@functools.cache
def kernels(architecture: str, text: str = "") -> dict[str, Kernel]:
    """The kernels of a source, compiled once; those of fastps' own rules by default."""
    return kernels_of(runtime.compile_with_nvrtc(f"compute_{architecture}", text).decode())


class Judge:
    """Launches kernels of PTX in the place of the host's functions."""

    def __init__(self, made: dict[str, Kernel]) -> None:
        self.kernels = made
        self.launched: set[str] = set()

    def launch(self, name: str, argument: Any, blocks: int, threads: int = 0) -> None:
        self.launched.add(name)
        assert argument.nbytes == launch_args.argument_bytes(name)
        argument = aligned(argument)
        reads, writes = launch_args.accessed(name, Launch(argument, blocks))
        memory = Memory([*reads, (argument.ctypes.data, argument.nbytes)], writes)
        Threads(self.kernels[name], argument, blocks, THREADS, memory).run()

    def launch_users(self, name: str, launch: Launch) -> None:
        self.launch(name, *launch)


def fold_all_rows(judge: Judge, dtypes: Iterable[str]) -> None:
    """Fold each row of each rule, in turn with each dtype and mode, by the kernels and by the reference."""
    situations = itertools.cycle(SITUATIONS)
    by_rule = {rule: [row for row in ALL_ROWS if row.rule == rule] for rule in launch_args.RULE_NAMES}
    combinations = list(itertools.product(dtypes, (FOLD_SUM, FOLD_EACH)))
    for rows in by_rule.values():
        for index in range(max(len(rows), len(combinations))):
            row, (dtype, mode) = rows[index % len(rows)], combinations[index % len(combinations)]
            situation = next(situations)
            job = make_job(row, 1 + index % 4, situation, index, (1, 4, 41))
            job = with_average(job, 0.9) if index % 3 == 2 else job
            halves = aligned(np.zeros(len(job.weights), np.uint16)) if index % 2 else None
            found, gradients = fold_on_device(job, mode, dtype, halves=halves, shown="bfloat16")
            with np.errstate(all="ignore"):
                assert_same_bits(found, fold_by_reference(job, mode, gradients), (row.name, dtype, mode, situation))
            if halves is not None:
                fold.narrow(found[0], expected := np.zeros_like(halves), launch_args.DTYPES["bfloat16"])
                for offset, length, _ in job.segments:
                    assert np.array_equal(halves[offset : offset + length], expected[offset : offset + length])


EACH_ARCHITECTURE = pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=[pytest.mark.slow] * (each != "90")) for each in ARCHITECTURES]
)


def in_float32(text: str) -> str:
    """A source without the folds of halves, for which NVRTC takes a third of the time."""
    for half in ("float16", "bfloat16"):
        text = text.replace(f"FPS_FOLD_KERNEL(name##_{half}, number, FPS_DEVICE_{half.upper()})", "")
    return text


@pytest.mark.slow
@sample_and_full(("float32",), tuple(launch_args.DTYPES), "dtypes")
@EACH_ARCHITECTURE
def test_every_rule_dtype_and_mode_has_the_bits_of_the_reference(
    architecture: str, dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(kernels(architecture, in_float32(runtime.source()) if dtypes == ("float32",) else ""))
    monkeypatch.setattr(host_fold, "launch", judge.launch)
    fold_all_rows(judge, dtypes)
    for dtype in launch_args.DTYPES:
        assert found_by_check(judge, dtype, at=[]) == [0, 0]
        assert [found_by_check(judge, dtype, at=[place]) for place in (0, 17, 32, 70)] == [[7, 0], [7, 0], [0, 7], [0, 7]]
    copy_by(judge)
    assert judge.launched == set(judge.kernels)
    assert judge.launched == set(runtime.kernel_names()) or dtypes == ("float32",)


def copy_by(judge: Judge) -> None:
    """Copy runs of several lengths; what lies between them stays."""
    source, target = aligned(np.arange(1, 257, dtype=np.float32)), aligned(np.zeros(256, np.float32))
    spans = [slice(0, 16), slice(32, 36), slice(64, 208)]
    runs = [(source[span].ctypes.data, target[span].ctypes.data, source[span].nbytes) for span in spans]
    [launch] = launch_args.copy_launches(runs)
    judge.launch(launch_args.COPY_KERNEL, *launch)
    expected = np.zeros_like(target)
    for span in spans:
        expected[span] = source[span]
    assert np.array_equal(target, expected)


def found_by_check(judge: Judge, dtype: str, at: list[int]) -> list[int]:
    """What the check of a slot of two parameters marks, if there are infinities at these places."""
    values = np.linspace(-3, 3, 80, dtype=np.float32)
    values[at] = np.inf
    slot, marks, segments = aligned(narrowed(values, dtype)), aligned(np.zeros(2, np.int32)), [(0, 18), (32, 39)]
    tiles = aligned(launch_args.tiles_of_segments(segments))
    launch = launch_args.check_launch(segments, slot.ctypes.data, marks.ctypes.data, 7, tiles.ctypes.data)
    judge.launch(launch_args.check_kernel(dtype), *launch)
    return list(marks.tolist())


@pytest.mark.slow
def test_jobs_on_simulated_devices_keep_their_promises_with_the_kernels_of_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Judge(kernels("90"))
    monkeypatch.setattr(host_fold, "launch", judge.launch)
    found = device_chaos.simulate(4, 0, 10)
    assert found.violations == [] and found.seeds == 10
    assert any(name.startswith("fps_fold") for name in judge.launched) and "fps_check_float32" in judge.launched


def users_source(name: str) -> str:
    return str(runtime.source(twins.RULES[name]().rule.device_text()))  # type: ignore[attr-defined]


def differ(name: str, made: dict[str, Kernel], dtypes: Iterable[str] = launch_args.DTYPES) -> set[str]:
    """What of a user's rule differs between its kernels and Numba's code."""
    judge, found = Judge(made), set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_users_rule, "SEGMENTS", [(0, 1, 0), (16, 6, 0), (32, 41, 0)])
        patch.setattr(test_users_rule, "SIZE", 80)
        for mode, dtype in itertools.product((FOLD_SUM, FOLD_EACH), dtypes):
            decay = 0.9 if mode == FOLD_SUM else 0.0
            found |= set(test_users_rule.differ(twins.RULES[name](), judge.launch_users, mode, dtype, decay, "float16"))
    return found


@pytest.mark.slow
@EACH_ARCHITECTURE
def test_a_users_rule_has_the_bits_of_numbas_code(architecture: str) -> None:
    assert differ("eight", kernels(architecture, users_source("eight"))) == set()


MUTANTS = {  # text of fold.cu, another in its place, and what is found
    "an unaligned stride": ("= args->state_stride;", "= args->state_stride + 1;", "misaligned (error 716): 16 bytes"),
    "an unaligned vector": ("&of, tile.first + place, FPS", "&of, tile.first + place + 1, FPS", "misaligned"),
    "a plane too many": ("args->rule_planes * stride, place", "(args->rule_planes + 1) * stride, place", "(error 700)"),
    "a fused multiply-add": ("total[i] + term;", "fmaf(more[i], entries[entry].scale, total[i]);", "state"),
    "an unfused multiply-add": (
        "fmaf(fraction, end - start, is_small ? start : end)",
        "fraction * (end - start) + (is_small ? start : end)",
        "state",
    ),
    "a swapped operand": ("end - start", "start - end", "state"),
    "contraction by the compiler": ("", "", "found mul.f32"),  # without .rn, so that ptxas may fuse it
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_of_the_kernels_are_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new, expected = MUTANTS[mutant]
    text = in_float32(users_source("eight"))
    assert old in text
    if mutant.startswith("contraction"):
        monkeypatch.setattr(runtime, "OPTIONS", ("--std=c++17", "--fmad=true"))
    made = kernels("90", f"{text.replace(old, new) if old else text}// {mutant}\n")
    try:
        found = " ".join(differ("eight", made, ["float32"]))
    except ValueError as error:
        found = str(error)
    assert expected in found
