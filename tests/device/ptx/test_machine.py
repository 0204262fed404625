"""The machine that runs PTX: its arithmetic, its branches, and what it refuses, in programs of a few lines."""

import doctest
from typing import Any

import numpy as np
import pytest

from tests.device.ptx import machine, program
from tests.device.ptx.machine import AccessError, Memory, Threads, decoded
from tests.device.ptx.program import kernels_of

HEAD = """.visible .entry program(
	.param .u64 program_param_0,
	.param .u64 program_param_1
)
.maxntid 256, 1, 1
{
	.reg .pred 	%p<9>;
	.reg .b16 	%rs<9>;
	.reg .f32 	%f<9>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<9>;
	.loc 1 2 3
	ld.param.u64 	%rd1, [program_param_0];
	ld.param.u64 	%rd2, [program_param_1];
	mov.u32 	%r1, %tid.x; // the thread's number, at which it stores
	mul.wide.u32 	%rd3, %r1, 4;
	add.s64 	%rd4, %rd2, %rd3;
	add.s64 	%rd5, %rd1, %rd3;
"""
NAN, INF = float("nan"), float("inf")


def run(body: str, values: Any = (0.0,) * 4, threads: int = 4, skew: int = 0) -> Any:
    """What a program stores, a word a thread, whose own input is %f1 = %r2."""
    room, outputs = np.zeros(len(values) + 8, np.float32), np.zeros(threads, np.uint32)
    inputs = room[-room.ctypes.data % 16 // 4 :][: len(values)]
    inputs[:] = values
    argument = np.array([inputs.ctypes.data + skew, outputs.ctypes.data], np.uint64).view(np.uint8)
    reads = [(array.ctypes.data, array.nbytes) for array in (inputs, argument)]
    memory = Memory(reads, [(outputs.ctypes.data, outputs.nbytes)])
    [kernel] = kernels_of(f"{HEAD}ld.global.f32 %f1, [%rd5];\nld.global.u32 %r2, [%rd5];\n{body}\nret;\n}}\n").values()
    Threads(kernel, argument, 1, threads, memory).run()
    return outputs


@pytest.mark.parametrize(("step", "values", "expected"), [
    ("fma.rn.f32 %f2, %f1, %f1, 0fBF800000", [1 + 2**-12] * 4, [2**-11 + 2**-24] * 4),  # one rounding: - 1
    ("mul.rn.f32 %f2, %f1, %f1", [1 + 2**-12] * 4, [1 + 2**-11] * 4),
    ("sqrt.rn.f32 %f2, %f1", [4.0, 2.0, 0.0, -1.0], [2.0, np.sqrt(np.float32(2)), 0.0, NAN]),
    ("rcp.rn.f32 %f2, %f1", [4.0, 3.0, 0.0, -0.0], [0.25, np.float32(1) / np.float32(3), INF, -INF]),
    ("max.f32 %f2, %f1, 0f3F800000", [NAN, 0.5, 2.0, -INF], [1.0, 1.0, 2.0, 1.0]),
    ("neg.f32 %f2, %f1", [0.0, -0.0, 1.0, -INF], [-0.0, 0.0, -1.0, INF]),
    ("setp.ne.f32 %p1, %f1, 0f3F800000; selp.f32 %f2, %f1, 0f40000000, %p1", [NAN, 1.0, 5.0, 0.0], [2.0, 2.0, 5.0, 0.0]),
    ("setp.neu.f32 %p1, %f1, %f1; selp.f32 %f2, 0f40000000, %f1, %p1", [NAN, 1.0, INF, 0.0], [2.0, 1.0, INF, 0.0]),
    ("cvt.u16.u32 %rs1, %r2; cvt.f32.f16 %f2, %rs1",
     np.array([0x3C00, 1, 0xFBFF, 0x7C00], np.uint32).view("f4"), [1, 2**-24, -65504, INF]),
])  # fmt: skip
def test_arithmetic_of_floats(step: str, values: Any, expected: Any) -> None:
    found = run(f"{step};\nst.global.f32 [%rd4], %f2;", values).view(np.float32)
    expected = np.array(expected, np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found) & ~np.isnan(found), np.signbit(expected))


@pytest.mark.parametrize(("step", "expected"), [
    ("shl.b32 %r3, %r1, 31", [0, 1 << 31, 0, 1 << 31]),
    ("shl.b32 %r3, 1, %r2", [2, 1 << 31, 0, 0]),  # by 1, 31, 32, 77
    ("shr.u32 %r3, -1, %r2", [2**31 - 1, 1, 0, 0]),
    ("shr.s32 %r3, -8, %r2", [2**32 - 4, 2**32 - 1, 2**32 - 1, 2**32 - 1]),
    ("sub.s32 %r3, 1, %r1", [1, 0, 2**32 - 1, 2**32 - 2]),
    ("mad.lo.s32 %r3, %r1, -3, 1", [1, 2**32 - 2, 2**32 - 5, 2**32 - 8]),
    ("setp.lt.s32 %p1, %r1, 2; selp.b32 %r3, -1, 7, %p1", [2**32 - 1, 2**32 - 1, 7, 7]),
    ("setp.gt.u32 %p2, %r1, 0; setp.lt.and.s32 %p1, %r1, 2, %p2; selp.u32 %r3, 1, 0, %p1", [0, 1, 0, 0]),
    ("not.b32 %r4, %r1; mov.b32 {%rs1, %rs2}, %r4; mov.b32 %r3, {%rs2, %rs1}", [2**32 - 1 - (n << 16) for n in range(4)]),
    ("cvt.u16.u32 %rs1, %r2; cvt.s64.s32 %rd6, -1; cvt.u32.u64 %r3, %rd6", [2**32 - 1] * 4),
])  # fmt: skip
def test_arithmetic_of_integers(step: str, expected: list[int]) -> None:
    assert run(f"{step};\nst.global.u32 [%rd4], %r3;", np.array([1, 31, 32, 77], np.uint32).view("f4")).tolist() == expected


def test_threads_take_their_own_ways_and_meet_again() -> None:
    """Each thread adds 1 as often as its number says; odd ones then add 100."""
    body = """
        mov.u32 %r3, 0; mov.u32 %r4, %r1;
    $L__BB0_1:
        setp.eq.s32 %p1, %r4, 0;
        @%p1 bra $L__BB0_2;
        add.s32 %r3, %r3, 1; add.s32 %r4, %r4, -1;
        bra.uni $L__BB0_1;
    $L__BB0_2:
        and.b32 %r5, %r1, 1;
        setp.eq.b32 %p2, %r5, 1;
        @!%p2 bra $L__BB0_3;
        add.s32 %r3, %r3, 100;
    $L__BB0_3:
        st.global.u32 [%rd4], %r3;"""
    assert run(body, (0.0,) * 9, threads=9).tolist() == [number + 100 * (number % 2) for number in range(9)]


def test_an_address_that_a_gpu_refuses_is_an_error() -> None:
    aligned = "ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1];"
    run(aligned, (0.0,) * 8)
    with pytest.raises(AccessError, match=r"misaligned \(error 716\): 16 bytes at 0x\w+ by ld.global.v4.f32 \{%f1"):
        run(aligned.replace("[%rd1]", "[%rd1+4]"), (0.0,) * 8)
    with pytest.raises(AccessError, match=r"misaligned \(error 716\): 4 bytes"):
        run("", (0.0,) * 8, skew=2)
    with pytest.raises(
        AccessError, match=r"outside of the launch's memory \(error 700\): 4 bytes .* by ld.global.f32 %f1, \[%rd5\]"
    ):
        run("", (0.0,) * 3)
    with pytest.raises(AccessError, match="outside of the launch's memory"):
        run("st.global.f32 [%rd1], %f1;")  # which may be read alone


@pytest.mark.parametrize("op", [
    "mul.f32", "add.ftz.f32", "div.approx.f32", "sqrt.full.f32", "atom.global.add.u32", "ld.volatile.f32", "bar.sync",
    "div.s32",
])  # fmt: skip
def test_what_ptxas_may_round_in_another_way_or_is_not_modelled_is_refused(op: str) -> None:
    with pytest.raises(ValueError, match=f"expected an operation of the tables of tests/device/ptx, found {op}"):
        decoded(op)


def test_the_examples_in_docstrings_run() -> None:
    assert [doctest.testmod(module).failed for module in (machine, program)] == [0, 0]


def test_a_guard_of_another_instruction_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a guard of branches alone, found @%p1 add.s32"):
        run("setp.eq.s32 %p1, %r1, 0; @%p1 add.s32 %r1, %r1, 1;")
