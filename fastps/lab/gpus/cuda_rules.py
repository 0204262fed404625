"""The rules of the CUDA runtime for the calls that fastps makes, as a model that a record of calls is replayed against.

The model is stricter than CUDA: what CUDA leaves undefined, counts or repairs is an error here, too. It knows memory, handles,
events, streams, devices and peer access, across processes; it knows no times. A call that it does not know is an error.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastps.device.cuda import (
    COPY_DEFAULT,
    EVENT_DISABLE_TIMING,
    EVENT_INTERPROCESS,
    IPC_LAZY_PEER_ACCESS,
    SHARED_BYTES,
)
from fastps.device.interface import DeviceError
from fastps.kernels.cuda import launch_args
from fastps.kernels.cuda.launch_args import Launch
from fastps.lab.gpus.cuda_calls import Call

_DEFAULT_STREAM = 0


class CudaRuleError(DeviceError):
    """A recorded call breaks a rule of CUDA."""


@dataclass
class _Memory:
    """An allocation: on a device, or in host memory (-1). `users` are the processes that have it open, besides the owner."""

    process: int
    device: str
    size: int
    is_freed: bool = False
    users: set[int] = field(default_factory=set)


@dataclass
class _Event:
    process: int
    device: str
    flags: int
    records: int = 0
    is_destroyed: bool = False


@dataclass
class _Process:
    """What one process has: addresses of memory, events and streams by their numbers, and each thread's device."""

    buses: dict[int, str] = field(default_factory=dict)  # by the process's number of a device: its bus id
    memory: dict[int, _Memory] = field(default_factory=dict)
    events: dict[int, _Event] = field(default_factory=dict)
    streams: dict[int, int] = field(default_factory=dict)  # to the process's number of a device
    current: dict[int, int] = field(default_factory=dict)
    enabled: set[tuple[str, str]] = field(default_factory=set)  # pairs of buses between which peer access is enabled


class CudaRules:
    """The state of all processes, after the calls so far. `peers`: the pairs of bus ids with peer access.

    >>> rules = CudaRules()
    >>> rules.check(Call(1, process=1, thread=1, name="setDevice", arguments=(0,)))
    >>> rules.check(Call(2, 1, 1, "free", (4096,)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fastps.lab.gpus.cuda_rules.CudaRuleError: free(4096) of process 1: expected the address of an allocation...
    """

    def __init__(self, peers: Iterable[frozenset[str]] = ()) -> None:
        self._peers = set(peers)
        self._processes: dict[int, _Process] = {}
        self._handles: dict[bytes, _Memory | _Event] = {}
        self._rules: dict[str, Callable[..., None]] = {
            name.removeprefix("_call_"): getattr(self, name) for name in dir(self) if name.startswith("_call_")
        }

    def replay(self, calls: Iterable[Call]) -> int:
        """Check calls in their order; returns how many. Raises CudaRuleError at the first that breaks a rule."""
        count = 0
        for call in calls:
            self.check(call)
            count += 1
        return count

    def check(self, call: Call) -> None:
        """Check one call, and take its effect. Raises CudaRuleError."""
        rule = self._rules.get(call.name)
        if rule is None:
            self._fail(call, "expected a call that the model knows", "another: teach the model its rules")
        else:
            of = self._processes.setdefault(call.process, _Process())
            rule(call, of, *call.arguments)

    def end(self, process: int) -> None:
        """Check that a process that has ended left nothing open."""
        for address, memory in self._processes.get(process, _Process()).memory.items():
            if memory.device and memory.process != process:
                raise CudaRuleError(f"process {process}: expected it to close {address:#x} before its end, found it open")

    # -- helpers -----------------------------------------------------------------------------------

    def _fail(self, call: Call, expected: str, found: str) -> None:
        arguments = ", ".join(
            f"{each:#x}" if isinstance(each, int) and each > 1 << 20 else str(each) for each in call.arguments
        )
        raise CudaRuleError(f"{call.name}({arguments[:100]}) of process {call.process}: {expected}, found {found}")

    def _need(self, call: Call, holds: object, expected: str, found: str) -> None:
        if not holds:
            self._fail(call, expected, found)

    def _device(self, call: Call, of: _Process) -> int:
        """The device of the calling thread."""
        self._need(call, call.thread in of.current, "expected a thread that has set its device", "one that has not")
        return of.current[call.thread]

    def _bus(self, of: _Process, device: int) -> str:
        """The bus id of a process's device; until the process asks for it, a name of its own."""
        return of.buses.get(device, f"device {device}")

    def _stream(self, call: Call, of: _Process, stream: int) -> int:
        """The device of a stream of the process."""
        if stream == _DEFAULT_STREAM:
            return self._device(call, of)
        self._need(call, stream in of.streams, "expected a stream of this process", "none")
        return of.streams[stream]

    def _on_own_device(self, call: Call, of: _Process, stream: int) -> None:
        """The stream of a launch or a copy is one of the thread's device."""
        device = self._stream(call, of, stream)
        self._need(
            call, device == self._device(call, of), "expected a stream of the thread's device", f"one of device {device}"
        )

    def _reach(self, call: Call, of: _Process, memory: _Memory) -> None:
        mine = self._bus(of, self._device(call, of))
        if memory.device and memory.device != mine:
            reached = frozenset((mine, memory.device)) in self._peers
            self._need(call, reached, f"expected peer access from {mine} to {memory.device}", "none")
            if memory.process == call.process:  # memory that was opened by a handle has it enabled
                is_enabled = (mine, memory.device) in of.enabled
                self._need(call, is_enabled, f"expected enabled peer access from {mine} to {memory.device}", "that it is not")

    def _touch(self, call: Call, of: _Process, address: int, size: int) -> None:
        """The bytes lie in memory that the process has open and its thread's device reaches."""
        for begin, memory in of.memory.items():
            if begin <= address and address + size <= begin + memory.size:
                self._need(call, not memory.is_freed, "expected memory in use", "memory that its owner has freed")
                self._reach(call, of, memory)
                return
        self._fail(call, "expected memory that this process has open", f"{size} bytes at {address:#x}")

    def _event(self, call: Call, of: _Process, event: int) -> _Event:
        self._need(call, event in of.events, "expected an event of this process", "none")
        self._need(call, not of.events[event].is_destroyed, "expected an event in use", "one that was destroyed")
        return of.events[event]

    # -- devices -----------------------------------------------------------------------------------

    def _call_getDeviceCount(self, call: Call, of: _Process) -> None:
        """Needs nothing."""

    def _call_setDevice(self, call: Call, of: _Process, device: int) -> None:
        of.current[call.thread] = device

    def _call_identity(self, call: Call, of: _Process, device: int) -> None:
        of.buses[device] = str(call.result)

    def _call_deviceGetPCIBusId(self, call: Call, of: _Process, device: int) -> None:
        """Needs nothing."""

    def _call_deviceCanAccessPeer(self, call: Call, of: _Process, device: int, peer: int) -> None:
        self._need(call, device != peer, "expected two devices", "one")

    def _call_deviceEnablePeerAccess(self, call: Call, of: _Process, peer: int) -> None:
        pair = self._bus(of, self._device(call, of)), self._bus(of, peer)
        self._need(call, frozenset(pair) in self._peers, f"expected peer access from {pair[0]} to {pair[1]}", "none")
        self._need(call, pair not in of.enabled, "expected peer access that is not enabled", "that it is")
        of.enabled.add(pair)

    def _call_memGetInfo(self, call: Call, of: _Process) -> None:
        self._device(call, of)

    def _call_deviceSynchronize(self, call: Call, of: _Process) -> None:
        self._device(call, of)

    # -- memory ------------------------------------------------------------------------------------

    def _call_malloc(self, call: Call, of: _Process, size: int) -> None:
        self._need(call, size > 0, "expected a size", str(size))
        of.memory[call.result] = _Memory(call.process, self._bus(of, self._device(call, of)), size)

    def _own(self, call: Call, of: _Process, address: int) -> _Memory:
        memory = of.memory.get(address)
        is_own = memory is not None and memory.process == call.process and memory.device and not memory.is_freed
        self._need(call, is_own, "expected the address of an allocation of its own", "none")
        assert memory is not None
        return memory

    def _call_free(self, call: Call, of: _Process, address: int) -> None:
        memory = self._own(call, of, address)
        self._need(call, not memory.users, "expected memory that no process has open", f"that {sorted(memory.users)} have it")
        memory.is_freed = True
        del of.memory[address]

    def _call_memsetAsync(self, call: Call, of: _Process, address: int, value: int, size: int, stream: int) -> None:
        self._on_own_device(call, of, stream)
        self._touch(call, of, address, size)

    def _call_memcpyAsync(self, call: Call, of: _Process, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self._need(call, kind == COPY_DEFAULT, "expected the kind of copy that addresses determine", str(kind))
        self._need(call, size > 0, "expected bytes to copy", str(size))
        self._on_own_device(call, of, stream)
        self._touch(call, of, source, size)
        self._touch(call, of, to, size)

    def _call_ipcGetMemHandle(self, call: Call, of: _Process, address: int) -> None:
        memory = self._own(call, of, address)
        self._need(call, memory.size % SHARED_BYTES == 0, "expected shared memory of whole 2 MiB", f"{memory.size} bytes")
        self._handles[bytes(call.result)] = memory

    def _call_ipcOpenMemHandle(self, call: Call, of: _Process, handle: bytes, flags: int) -> None:
        memory = self._handles.get(bytes(handle))
        self._need(call, isinstance(memory, _Memory), "expected a handle that a process has exported", "another")
        assert isinstance(memory, _Memory)
        self._need(call, memory.process != call.process, "expected another process's handle", "its own")
        self._need(call, not memory.is_freed, "expected memory in use", "memory that its owner has freed")
        self._need(call, call.process not in memory.users, "expected memory that is not open", "that it is open already")
        self._need(call, flags == IPC_LAZY_PEER_ACCESS, "expected the flag that enables peer access", str(flags))
        self._reach(call, of, memory)
        memory.users.add(call.process)
        of.memory[call.result] = memory

    def _call_ipcCloseMemHandle(self, call: Call, of: _Process, address: int) -> None:
        memory = of.memory.get(address)
        is_opened = memory is not None and memory.process != call.process
        self._need(call, is_opened, "expected memory that was opened by a handle", "none")
        assert memory is not None
        memory.users.discard(call.process)
        del of.memory[address]

    def _call_hostAlloc(self, call: Call, of: _Process, size: int, flags: int) -> None:
        self._device(call, of)
        of.memory[call.result] = _Memory(call.process, "", size)

    def _call_freeHost(self, call: Call, of: _Process, address: int) -> None:
        memory = of.memory.pop(address, None)
        is_host = memory is not None and not memory.device
        self._need(call, is_host, "expected memory from hostAlloc", "none")

    # -- streams and events ------------------------------------------------------------------------

    def _call_compute_stream(self, call: Call, of: _Process, device: int) -> None:
        of.streams[call.result] = device

    def _call_streamCreateWithFlags(self, call: Call, of: _Process, flags: int) -> None:
        of.streams[call.result] = self._device(call, of)

    def _call_streamDestroy(self, call: Call, of: _Process, stream: int) -> None:
        self._stream(call, of, stream)
        self._need(call, of.streams.pop(stream, None) is not None, "expected a stream that was made", "the default stream")

    def _call_streamSynchronize(self, call: Call, of: _Process, stream: int) -> None:
        self._stream(call, of, stream)

    def _call_streamQuery(self, call: Call, of: _Process, stream: int) -> None:
        self._stream(call, of, stream)

    def _call_eventCreateWithFlags(self, call: Call, of: _Process, flags: int) -> None:
        of.events[call.result] = _Event(call.process, self._bus(of, self._device(call, of)), flags)

    def _call_eventDestroy(self, call: Call, of: _Process, event: int) -> None:
        self._event(call, of, event)
        if of.events[event].process == call.process:
            of.events[event].is_destroyed = True
        del of.events[event]

    def _call_ipcGetEventHandle(self, call: Call, of: _Process, event: int) -> None:
        found = self._event(call, of, event)
        self._need(call, found.process == call.process, "expected an event of its own", "one that it has opened")
        shared = EVENT_INTERPROCESS | EVENT_DISABLE_TIMING
        self._need(call, found.flags & shared == shared, "expected an event made for sharing, without timing", str(found.flags))
        self._handles[bytes(call.result)] = found

    def _call_ipcOpenEventHandle(self, call: Call, of: _Process, handle: bytes) -> None:
        event = self._handles.get(bytes(handle))
        self._need(call, isinstance(event, _Event), "expected a handle of an event", "another")
        assert isinstance(event, _Event)
        self._need(call, event.process != call.process, "expected another process's handle", "its own")
        self._need(call, not event.is_destroyed, "expected an event in use", "one that was destroyed")
        mine = self._bus(of, self._device(call, of))
        reached = event.device == mine or frozenset((mine, event.device)) in self._peers
        self._need(call, reached, f"expected peer access from {mine} to {event.device}", "none")
        of.events[call.result] = event

    def _call_eventRecord(self, call: Call, of: _Process, event: int, stream: int) -> None:
        found = self._event(call, of, event)
        self._need(call, found.process == call.process, "expected an event of its own", "one that it has opened")
        bus = self._bus(of, self._stream(call, of, stream))
        self._need(call, found.device == bus, f"expected a stream of the event's device {found.device}", f"one of {bus}")
        found.records += 1

    def _call_streamWaitEvent(self, call: Call, of: _Process, stream: int, event: int) -> None:
        self._stream(call, of, stream)
        self._need(call, self._event(call, of, event).records, "expected an event that was recorded", "that it was not")

    def _call_eventSynchronize(self, call: Call, of: _Process, event: int) -> None:
        self._need(call, self._event(call, of, event).records, "expected an event that was recorded", "that it was not")

    def _call_eventQuery(self, call: Call, of: _Process, event: int) -> None:
        found = self._event(call, of, event)
        self._need(call, found.process == call.process, "expected an event of its own", "one that it has opened")
        self._need(call, found.records, "expected an event that was recorded", "that it was not")

    def _call_launch(self, call: Call, of: _Process, device: int, kernel: str, launch: Launch, stream: int) -> None:
        """The kernel's memory is open. CUDA reads the whole parameter, and takes 4,096 bytes of parameters, and some blocks."""
        current = self._device(call, of)
        self._need(call, current == device, "expected a launch on the thread's device", f"device {current}")
        self._on_own_device(call, of, stream)
        self._need(call, launch.blocks > 0, "expected blocks to launch", str(launch.blocks))
        expected, found = launch_args.argument_bytes(kernel), launch.argument.nbytes
        self._need(call, found == expected <= 4096, f"expected {expected} bytes of parameters", str(found))
        for spans in launch_args.accessed(kernel, launch):
            for address, size in spans:
                self._touch(call, of, address, size)


def check_record(calls: Iterable[Call], peers: Iterable[frozenset[str]] = (), ended: Iterable[Any] = ()) -> int:
    """Replay the merged calls of a job's processes; returns how many. `ended`: processes that must have left nothing open."""
    rules = CudaRules(peers)
    count = rules.replay(calls)
    for process in ended:
        rules.end(process)
    return count
