"""Whether processes can share the memory and the events of GPUs on this machine, tried before a job needs it.

This process allocates and records an event on each GPU, and another, one for each GPU, opens all handles and reads. `python -m
fastps.device.sharing` tries GPU 0, says in a line what it found, and has the exit code 1 if sharing does not work.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError

Handles = tuple[bytes, bytes]
"""Of memory, and of the event behind what was written to it."""
_WORDS = b"fastps!!" * 8
_CHILD_S = 60.0


def try_sharing(devices: Sequence[CudaDevice], read: Callable[[int, Sequence[Handles]], list[str]]) -> tuple[bool, str]:
    """Whether another process opens memory and an event of each GPU on each GPU, and what is to be said of it.

    `read(reader, handles)` opens them all in one process, on the GPU `reader`, and returns what failed with each, or "". A
    reader that peer access does not let reach the owner is no failure of CUDA IPC if it opens its own GPU's memory.
    """
    count, failed = len(devices), dict[tuple[int, int], str]()
    try:
        handles = [share(device) for device in devices]
        for reader in range(count):
            failed |= {(owner, reader): text for owner, text in enumerate(read(reader, handles)) if text}
    except (DeviceError, OSError, subprocess.SubprocessError) as error:
        failed[0, 0] = str(error)
    finally:
        for device in devices:
            device.shut()
    own = {pair: text for pair, text in failed.items() if pair[0] == pair[1]}
    if own:
        return False, f"does not work, use FASTPS_PLACEMENT=host: {next(iter(own.values()))}"
    if failed:
        pairs, text = list(failed), next(iter(failed.values()))
        return True, f"works on each GPU; not from one to another for (owner, reader) {pairs}: {text}"
    everywhere = "" if count == 1 else f", for all {count * count} pairs of GPUs"
    return True, f"another process opened memory and an event of this one, and read them{everywhere}"


def share(device: CudaDevice) -> Handles:
    """Write a text on a GPU; returns the handles of its memory and of the event behind it. Raises DeviceError."""
    stream, event, address = device.make_stream(), device.make_event(), device.allocate(256)
    staging = device.host_memory(len(_WORDS))
    staging[:] = memoryview(_WORDS)
    device.copy(address, staging.ctypes.data, len(_WORDS), stream)
    device.record(event, stream)
    return device.export(address), device.export_event(event)


def read_in_child(reader: int, handles: Sequence[Handles]) -> list[str]:
    """Read by handles in a process of its own, on one of the GPUs. Raises DeviceError with that process's last words."""
    texts = [handle.hex() for pair in handles for handle in pair]
    command = [sys.executable, "-m", "fastps.device.sharing", str(reader), *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_S, check=False)
    if done.returncode:
        raise DeviceError((done.stderr.strip().splitlines() or ["the other process ended without a word"])[-1])
    found: list[str] = json.loads(done.stdout)
    return found


def read_shared(device: CudaDevice, handles: Sequence[Handles]) -> list[str]:
    """Open memory and events of another process on a GPU, and read each; returns what failed with each, or ""."""
    found, stream = [], device.make_stream()
    try:
        for memory_handle, event_handle in handles:
            try:
                device.wait(device.open_event(event_handle), stream)
                address, staging = device.open(memory_handle), device.host_memory(len(_WORDS))
                device.copy(staging.ctypes.data, address, len(_WORDS), stream)
                device.synchronize(stream)
                found.append("" if staging.tobytes() == _WORDS else "the memory that was opened holds something else")
            except DeviceError as error:
                found.append(str(error))
    finally:
        device.shut()
    return found


def _main(arguments: list[str]) -> int:
    """Read by handles for another process; without arguments, try whether GPU 0 can be shared, and print why it cannot."""
    if arguments:
        handles = [bytes.fromhex(text) for text in arguments[1:]]
        print(json.dumps(read_shared(CudaDevice(int(arguments[0])), list(zip(handles[::2], handles[1::2], strict=True)))))
        return 0
    try:
        works, said = try_sharing([CudaDevice()], read_in_child)
    except DeviceError as error:
        works, said = False, str(error)
    print(said)
    return int(not works)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
