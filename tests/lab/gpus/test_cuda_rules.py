"""The model of CUDA's rules: what two processes rightly do passes, and each rule, once broken, is found by its name."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fastps.kernels.cuda.launch_args import Buffers, Shape, check_launch, make_launches
from fastps.lab.gpus.cuda_calls import Call
from fastps.lab.gpus.cuda_rules import CudaRuleError, CudaRules, check_record

MIB2 = 1 << 21
A, B, HOST = 0x7F0000000000, 0x7E0000000000, 0x7D0000000000
[FOLD], _ = make_launches(Shape(0, 0, 0.0, ((0, 16, 0),)), 0, [], np.zeros(1, np.int64), Buffers(A, A + 64, 0, 0, 16), A + 4096)
FOLD_CALL = (0, "fps_fold_sgd_float32", FOLD, 11)
MEMORY, EVENT = b"m" * 64, b"e" * 64
PEERS = [frozenset(("gpu 0", "gpu 1"))]

Step = tuple[int, str, tuple[Any, ...], Any]


def job() -> list[Step]:
    """Process 1 on GPU 0 allocates and folds; process 2 on GPU 1 maps its memory, waits for its event, and copies."""
    both: list[Step] = []
    for process in (1, 2):
        both += [
            (process, "getDeviceCount", (), 2),
            (process, "setDevice", (0,), None),
            (process, "identity", (0,), f"gpu {process - 1}"),
            (process, "streamCreateWithFlags", (1,), 10 + process),
            (process, "eventCreateWithFlags", (6,), 20 + process),
            (process, "hostAlloc", (4096, 1), HOST),
        ]
    return [
        *both,
        (1, "malloc", (MIB2,), A),
        (1, "memsetAsync", (A, 0, MIB2, 0), None),
        (1, "ipcGetMemHandle", (A,), MEMORY),
        (1, "ipcGetEventHandle", (21,), EVENT),
        (1, "launch", (0, "fps_check_float32", check_launch([(0, 16)], A, A + 512, 1, A + 4096), 11), None),
        (1, "launch", FOLD_CALL, None),
        (1, "memcpyAsync", (A, HOST, 256, 4, 11), None),
        (1, "eventRecord", (21, 11), None),
        (1, "streamQuery", (11,), 600),
        (2, "ipcOpenMemHandle", (MEMORY, 1), B),
        (2, "ipcOpenEventHandle", (EVENT,), 32),
        (2, "streamWaitEvent", (12, 32), None),
        (2, "memcpyAsync", (HOST, B, 4096, 4, 12), None),
        (2, "streamSynchronize", (12,), None),
        (2, "ipcCloseMemHandle", (B,), None),
        (2, "freeHost", (HOST,), None),
        (1, "eventQuery", (21,), 600),
        (1, "eventSynchronize", (21,), None),
        (1, "identity", (1,), "gpu 1"),
        (1, "setDevice", (1,), None),
        (1, "streamCreateWithFlags", (1,), 13),
        (1, "deviceEnablePeerAccess", (0,), None),
        (1, "memcpyAsync", (HOST, A, 64, 4, 13), None),
        (1, "streamDestroy", (13,), None),
        (1, "setDevice", (0,), None),
        (1, "free", (A,), None),
        (1, "streamDestroy", (11,), None),
        (1, "eventDestroy", (21,), None),
    ]


def replay(steps: list[Step], threads: dict[int, int] | None = None) -> int:
    calls = [Call(at, process, 1, name, arguments, result) for at, (process, name, arguments, result) in enumerate(steps)]
    if threads:
        calls = [call._replace(thread=threads.get(at, 1)) for at, call in enumerate(calls)]
    return check_record(calls, PEERS, (1, 2))


def at(steps: list[Step], process: int, name: str) -> int:
    return next(index for index, step in enumerate(steps) if step[:2] == (process, name))


def without(process: int, name: str) -> Callable[[list[Step]], list[Step]]:
    return lambda steps: [step for step in steps if step[:2] != (process, name)]


def moved(process: int, name: str, before: tuple[int, str]) -> Callable[[list[Step]], list[Step]]:
    def change(steps: list[Step]) -> list[Step]:
        step = steps.pop(at(steps, process, name))
        steps.insert(at(steps, *before), step)
        return steps

    return change


def changed(process: int, name: str, arguments: tuple[Any, ...]) -> Callable[[list[Step]], list[Step]]:
    def change(steps: list[Step]) -> list[Step]:
        index = at(steps, process, name)
        steps[index] = (process, name, arguments, steps[index][3])
        return steps

    return change


def added(step: Step, before: tuple[int, str]) -> Callable[[list[Step]], list[Step]]:
    def change(steps: list[Step]) -> list[Step]:
        steps.insert(at(steps, *before), step)
        return steps

    return change


def launched(**changes: Any) -> Callable[[list[Step]], list[Step]]:
    return changed(1, "launch", (*FOLD_CALL[:2], FOLD._replace(**changes), 11))


NOT_OPEN = "expected memory that this process has open"
BROKEN: dict[str, tuple[Callable[[list[Step]], list[Step]], str]] = {
    "no device": (without(1, "setDevice"), "expected a thread that has set its device"),
    "unknown call": (added((1, "graphUpload", (42,), None), (1, "free")), "teach the model"),
    "launch on another device": (changed(1, "launch", (1, *FOLD_CALL[1:])), "a launch on the thread's device"),
    "stream of another device": (
        lambda steps: added((1, "setDevice", (1,), None), (1, "launch"))(changed(1, "launch", (1, *FOLD_CALL[1:]))(steps)),
        "a stream of the thread's device",
    ),
    "stream of another process": (changed(1, "launch", (*FOLD_CALL[:3], 12)), "expected a stream of this process"),
    "stream after its end": (moved(1, "streamDestroy", (1, "launch")), "expected a stream of this process"),
    "query of a stream of another process": (changed(1, "streamQuery", (12,)), "expected a stream of this process"),
    "open before export": (moved(2, "ipcOpenMemHandle", (1, "ipcGetMemHandle")), "a handle that a process has exported"),
    "open by its exporter": (
        added((1, "ipcOpenMemHandle", (MEMORY, 1), B), (2, "ipcOpenMemHandle")),
        "another process's handle",
    ),
    "open after free": (moved(1, "free", (2, "ipcOpenMemHandle")), "found memory that its owner has freed"),
    "open twice": (added((2, "ipcOpenMemHandle", (MEMORY, 1), B + MIB2), (2, "ipcOpenEventHandle")), "that it is open already"),
    "open without peer access": (changed(2, "ipcOpenMemHandle", (MEMORY, 0)), "the flag that enables peer access"),
    "free while open": (moved(1, "free", (2, "ipcCloseMemHandle")), r"that \[2\] have it"),
    "never closed": (without(2, "ipcCloseMemHandle"), r"that \[2\] have it"),
    "copy after close": (moved(2, "ipcCloseMemHandle", (2, "memcpyAsync")), NOT_OPEN),
    "close twice": (added((2, "ipcCloseMemHandle", (B,), None), (2, "freeHost")), "opened by a handle, found none"),
    "close of own memory": (added((1, "ipcCloseMemHandle", (A,), None), (1, "free")), "opened by a handle, found none"),
    "free of opened memory": (added((2, "free", (B,), None), (2, "ipcCloseMemHandle")), "an allocation of its own"),
    "free twice": (added((1, "free", (A,), None), (1, "free")), "an allocation of its own"),
    "export of a part": (
        lambda steps: changed(1, "malloc", (4096,))(changed(1, "memsetAsync", (A, 0, 4096, 0))(steps)),
        "expected shared memory of whole 2 MiB",
    ),
    "export of opened memory": (added((2, "ipcGetMemHandle", (B,), b"x"), (2, "memcpyAsync")), "an allocation of its own"),
    "launch after free": (moved(1, "free", (1, "launch")), NOT_OPEN),
    "fold of memory that is not open": (launched(blocks=MIB2 // 16), NOT_OPEN),
    "launch without blocks": (launched(blocks=0), "expected blocks to launch"),
    "launch with less than the parameters": (launched(argument=FOLD.argument[:2048]), "4096 bytes of parameters, found 2048"),
    "copy beyond the end": (changed(2, "memcpyAsync", (HOST, B, MIB2 + 1, 4, 12)), "memory that this process has open"),
    "copy to plain memory": (changed(2, "memcpyAsync", (0x1000, B, 4096, 4, 12)), "memory that this process has open"),
    "kind of copy": (changed(2, "memcpyAsync", (HOST, B, 4096, 1, 12)), "the kind of copy"),
    "empty copy": (changed(2, "memcpyAsync", (HOST, B, 0, 4, 12)), "bytes to copy"),
    "event without sharing": (changed(1, "eventCreateWithFlags", (2,)), "an event made for sharing"),
    "another's event recorded": (added((2, "eventRecord", (32, 12), None), (2, "streamWaitEvent")), "an event of its own"),
    "event of its own": (added((1, "ipcOpenEventHandle", (EVENT,), 33), (2, "ipcOpenEventHandle")), "another process's handle"),
    "event exported again": (added((2, "ipcGetEventHandle", (32,), b"x"), (2, "streamWaitEvent")), "an event of its own"),
    "wait before record": (without(1, "eventRecord"), "an event that was recorded"),
    "wait for a destroyed event": (moved(1, "eventDestroy", (2, "streamWaitEvent")), "one that was destroyed"),
    "host waits before record": (moved(1, "eventSynchronize", (1, "eventRecord")), "an event that was recorded"),
    "question for an event before record": (moved(1, "eventQuery", (1, "eventRecord")), "an event that was recorded"),
    "question for another process's event": (added((2, "eventQuery", (32,), 0), (2, "streamWaitEvent")), "an event of its own"),
    "event and stream of two devices": (
        lambda steps: added((1, "streamCreateWithFlags", (1,), 19), (1, "eventRecord"))(
            added((1, "setDevice", (1,), None), (1, "eventRecord"))(changed(1, "eventRecord", (21, 19))(steps))
        ),
        "a stream of the event's device",
    ),
    "memory handle opened as an event": (changed(2, "ipcOpenEventHandle", (MEMORY,)), "a handle of an event"),
    "free of host memory by another call": (added((1, "free", (HOST,), None), (1, "free")), "an allocation of its own"),
    "host memory freed twice": (added((2, "freeHost", (HOST,), None), (2, "freeHost")), "memory from hostAlloc"),
    "memory of its other device without enabled access": (without(1, "deviceEnablePeerAccess"), "expected enabled peer access"),
    "access enabled twice": (
        added((1, "deviceEnablePeerAccess", (0,), None), (1, "deviceEnablePeerAccess")),
        "peer access that is not enabled",
    ),
}


def test_what_is_right_passes() -> None:
    assert replay(job()) == len(job())


@pytest.mark.parametrize("name", list(BROKEN))
def test_each_broken_rule_is_found(name: str) -> None:
    change, expected = BROKEN[name]
    with pytest.raises(CudaRuleError, match=expected):
        replay(change(job()))


def test_a_call_by_a_thread_without_a_device_is_found() -> None:
    steps = job()
    with pytest.raises(CudaRuleError, match="a thread that has set its device, found one that has not"):
        replay(steps, {at(steps, 1, "launch"): 2})


def test_memory_and_events_out_of_reach_are_found() -> None:
    steps = job()
    calls = [Call(index, process, 1, name, arguments, result) for index, (process, name, arguments, result) in enumerate(steps)]
    with pytest.raises(CudaRuleError, match="expected peer access from gpu 1 to gpu 0, found none"):
        check_record(calls)
    with pytest.raises(CudaRuleError, match=r"ipcOpenEventHandle.* expected peer access from gpu 1 to gpu 0, found none"):
        CudaRules().replay(call for call in calls if call.name != "ipcOpenMemHandle")


def test_memory_that_is_left_open_is_found_at_the_end() -> None:
    rules = CudaRules(PEERS)
    steps = job()
    last = at(steps, 2, "ipcCloseMemHandle")
    rules.replay(Call(index, *step[:1], 1, *step[1:]) for index, step in enumerate(steps[:last]))
    with pytest.raises(CudaRuleError, match="expected it to close"):
        rules.end(2)


def test_every_call_of_the_device_has_its_rule_broken_here() -> None:
    """A rule without a broken example here could be empty, and nothing would tell."""
    known = set(CudaRules()._rules)
    named = {step[1] for step in job()}
    assert named <= known
    assert known - named == {"deviceCanAccessPeer", "deviceGetPCIBusId", "memGetInfo", "deviceSynchronize", "compute_stream"}
