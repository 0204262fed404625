"""The devices of a simulated node: work runs only in the order that events give it, and what breaks a rule is an error."""

from typing import Any

import numpy as np
import pytest

from fastps.device.interface import DeviceError, DeviceLostError
from fastps.lab.gpus.hazards import HazardError
from fastps.lab.gpus.stepped import SteppedDevice, SteppedNode, StuckError


def two(unreachable: Any = (), seed: int = 0) -> tuple[SteppedNode, SteppedDevice, SteppedDevice]:
    node = SteppedNode(seed, unreachable)
    return node, node.device(0, "gpu 0"), node.device(1, "gpu 1")


def filled(device: SteppedDevice, value: int) -> int:
    """The address of host memory full of a byte."""
    memory = device.host_memory(64)
    memory[:] = value
    return memory.ctypes.data


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("waits", [True, False])
def test_a_reader_that_waits_for_the_writers_event_is_in_order_and_another_is_not(waits: bool, seed: int) -> None:
    node, writer, reader = two(seed=seed)
    address = writer.allocate(64)
    reader.open(writer.export(address))
    event, stream, found = writer.make_event(), reader.make_stream(), reader.host_memory(64)
    writer.copy(address, filled(writer, 7), 64, writer.compute_stream())
    writer.record(event, writer.compute_stream())
    if waits:
        reader.wait(reader.open_event(writer.export_event(event)), stream)
    reader.copy(found.ctypes.data, address, 64, stream)
    if waits:
        reader.synchronize(stream)
        assert found.tolist() == [7] * 64
    else:
        hazard = r"memory of process 0 on gpu 0: 'copy of 64 bytes.*expected an event between them"
        with pytest.raises(HazardError, match=hazard):
            while node.step():
                pass


def test_a_write_over_what_another_stream_reads_needs_an_event_too() -> None:
    node, device, _ = two()
    address, other = device.allocate(64), device.make_stream()
    device.copy(device.host_memory(64).ctypes.data, address, 64, other)
    node.drain(other)
    device.copy(address, filled(device, 1), 64, device.compute_stream())
    with pytest.raises(HazardError, match=r"writes bytes 0 to 64, which 'copy of 64 bytes.*reads"):
        node.step()


def test_an_event_orders_what_was_recorded_before_and_nothing_after() -> None:
    node, device, _ = two()
    address, other, event = device.allocate(64), device.make_stream(), device.make_event()
    device.record(event, other)
    device.copy(address, filled(device, 1), 64, other)
    device.wait(event, device.compute_stream())
    device.copy(device.host_memory(64).ctypes.data, address, 64, device.compute_stream())
    with pytest.raises(HazardError):
        while node.step():
            pass


def test_a_host_that_has_waited_orders_its_own_later_work_and_not_another_processes() -> None:
    node, device, peer = two()
    address = device.allocate(64)
    peer.open(device.export(address))
    device.copy(address, filled(device, 1), 64, device.compute_stream())
    device.synchronize(device.compute_stream())
    later = device.make_stream()
    device.copy(address, filled(device, 2), 64, later)
    node.drain(later)
    peer.copy(peer.host_memory(64).ctypes.data, address, 64, peer.compute_stream())
    with pytest.raises(HazardError):
        node.step()


def test_without_peer_access_memory_does_not_open() -> None:
    _, device, peer = two([frozenset(("gpu 0", "gpu 1"))])
    assert not peer.can_reach("gpu 0") and peer.can_reach("gpu 1")
    with pytest.raises(DeviceLostError, match="peer access"):
        peer.open(device.export(device.allocate(64)))


def test_handles_go_stale_and_are_not_opened_where_they_were_made() -> None:
    node, device, peer = two()
    handle = device.export(device.allocate(64))
    with pytest.raises(DeviceError, match="has not open"):
        device.open(handle)
    address = peer.open(handle)
    with pytest.raises(DeviceError, match="while processes \\[1\\] have it open"):
        device.close(address)
    peer.close(address)
    device.close(address)
    with pytest.raises(DeviceLostError, match="has freed that memory"):
        peer.open(handle)
    event = device.export_event(device.make_event())
    node.kill(0)
    with pytest.raises(DeviceLostError, match="has ended"):
        peer.open_event(event)


def test_freed_memory_is_poisoned_and_work_on_it_is_an_error() -> None:
    node, device, _ = two()
    address = device.allocate(64)
    view = device.view(address, 16)
    device.copy(device.host_memory(64).ctypes.data, address, 64, device.compute_stream())
    device.close(address)
    assert np.isnan(view).all()
    with pytest.raises(DeviceError, match="is freed"):
        node.step()


def test_memory_and_events_belong_to_who_opened_or_made_them() -> None:
    node, device, peer = two()
    with pytest.raises(DeviceError, match="has not opened"):
        peer.view(device.allocate(64), 16)
    opened = peer.open_event(device.export_event(device.make_event()))
    with pytest.raises(DeviceError, match="to record, found one of process 0"):
        peer.record(opened, peer.compute_stream())
    with pytest.raises(DeviceError, match="expected a stream of process 1"):
        peer.wait(opened, device.compute_stream())
    with pytest.raises(DeviceError, match="expected memory of the node"):
        peer.view(1, 16)
    assert not node.step()


def test_who_waits_for_a_dead_processes_work_is_stuck_and_told() -> None:
    node, device, peer = two()
    event = device.make_event()
    device.record(event, device.compute_stream())
    peer.wait(peer.open_event(device.export_event(event)), peer.compute_stream())
    node.kill(0)
    with pytest.raises(StuckError, match="nothing does"):
        peer.synchronize_all()
    with pytest.raises(StuckError, match="never comes"):
        peer.synchronize_event(event)


def test_a_seed_gives_the_same_order_again_and_another_seed_another() -> None:
    def order(seed: int) -> list[int]:
        node = SteppedNode(seed)
        devices = [node.device(process, f"gpu {process}") for process in range(3)]
        targets = [device.host_memory(12) for device in devices]
        for number in range(12):
            device, target = devices[number % 3], targets[number % 3]
            device.copy(target.ctypes.data + number, filled(device, 1), 1, device.compute_stream())
        found, before = [], sum(targets)
        while node.step():
            found.append(int(np.flatnonzero(sum(targets) != before)[0]))
            before = sum(targets)
        return found

    for process in range(3):
        assert [number for number in order(1) if number % 3 == process] == list(range(process, 12, 3))
    assert order(1) == order(1) != order(2)
