"""The checks of `fastps doctor` for GPUs: which there are, whether processes can share memory, and peer access.

The check of sharing is real: this process allocates and records an event, and another opens both handles and reads, for each
pair of GPUs. Nothing here is a failure: a machine without a GPU trains on the CPU, and one without CuPy folds there.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch

from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.diagnostics.finding import Finding
from fastps.kernels.cuda import runtime

_WORDS = b"fastps!!" * 8
_CHILD_S = 60.0


def gpu_findings() -> list[Finding]:
    """Return the findings on GPUs: one line if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [Finding("GPUs", 0, "torch finds none, which is fine: fastps trains on the CPU")]
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    found = [Finding("GPUs", count, f"{count} ({names}); torch {torch.__version__}, CUDA {torch.version.cuda}")]
    try:
        cupy = runtime.load_cupy()
    except runtime.CudaUnavailableError as error:
        return [*found, Finding("shards on GPUs", "no", f"no, the fold runs on the CPU: {error}")]
    found.append(Finding("shards on GPUs", "yes", f"CuPy {cupy.__version__} compiles the kernels"))
    if count > 1:
        found.append(peer_access(count, torch.cuda.can_device_access_peer))
    found.append(sharing(count, lambda owner, reader: share_memory(CudaDevice(owner), partial(_in_child, reader))))
    return found


def peer_access(count: int, reaches: Callable[[int, int], bool]) -> Finding:
    """Which of the pairs of GPUs have peer access. `reaches`: whether one reads another's memory."""
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    reached = [pair for pair in pairs if reaches(*pair)]
    one_way = [pair for pair in reached if pair[::-1] not in reached]
    shown = "all reach each other" if len(reached) == len(pairs) else f"{len(reached)} of {len(pairs)} pairs: {reached}"
    if one_way:
        shown += f"; {one_way} in one direction only, which jobs on these GPUs refuse: use FASTPS_PLACEMENT=host"
    elif len(reached) < len(pairs):
        shown += "; between the others gradients and weights go through host memory"
    return Finding("peer access", len(reached), shown)


def sharing(count: int, share: Callable[[int, int], None]) -> Finding:
    """Whether another process opens memory and an event of each GPU on each GPU. `share(owner, reader)` raises an error.

    A reader that peer access does not let reach the owner is no failure of CUDA IPC if it opens its own GPU's memory.
    """
    failed = {}
    for owner in range(count):
        for reader in range(count):
            try:
                share(owner, reader)
            except (DeviceError, OSError, subprocess.SubprocessError) as error:
                failed[owner, reader] = str(error)
    own = {pair: text for pair, text in failed.items() if pair[0] == pair[1]}
    if own:
        return Finding("CUDA IPC", "no", f"does not work, use FASTPS_PLACEMENT=host: {next(iter(own.values()))}")
    if failed:
        pairs, text = list(failed), next(iter(failed.values()))
        return Finding("CUDA IPC", "works", f"works on each GPU; not from one to another for (owner, reader) {pairs}: {text}")
    everywhere = "" if count == 1 else f", for all {count * count} pairs of GPUs"
    return Finding("CUDA IPC", "works", f"another process opened memory and an event of this one, and read them{everywhere}")


def share_memory(device: CudaDevice, read: Callable[[bytes, bytes], bytes]) -> None:
    """Write a text on a GPU and let another process read it through its handles. Raises DeviceError."""
    try:
        stream, event, address = device.make_stream(), device.make_event(), device.allocate(256)
        staging = device.host_memory(len(_WORDS))
        staging[:] = memoryview(_WORDS)
        device.copy(address, staging.ctypes.data, len(_WORDS), stream)
        device.record(event, stream)
        found = read(device.export(address), device.export_event(event))
        device.synchronize(stream)
    finally:
        device.shut()
    if found != _WORDS:
        raise DeviceError("the memory that was opened holds something else")


def _in_child(reader: int, memory_handle: bytes, event_handle: bytes) -> bytes:
    """Read by handles in a process of its own, on one of the GPUs. Raises DeviceError with that process's last words."""
    done = subprocess.run(
        [sys.executable, "-m", "fastps.diagnostics.gpu", memory_handle.hex(), event_handle.hex(), str(reader)],
        capture_output=True,
        text=True,
        timeout=_CHILD_S,
        check=False,
    )
    if done.returncode:
        raise DeviceError((done.stderr.strip().splitlines() or ["the other process ended without a word"])[-1])
    return bytes.fromhex(done.stdout.strip())


def read_shared(device: CudaDevice, memory_handle: bytes, event_handle: bytes) -> bytes:
    """Return the contents of another process's memory after its event, read on a GPU."""
    try:
        stream = device.make_stream()
        device.wait(device.open_event(event_handle), stream)
        address, staging = device.open(memory_handle), device.host_memory(len(_WORDS))
        device.copy(staging.ctypes.data, address, len(_WORDS), stream)
        device.synchronize(stream)
        return staging.tobytes()
    finally:
        device.shut()


if __name__ == "__main__":
    handles = [bytes.fromhex(text) for text in sys.argv[1:3]]
    sys.stdout.write(read_shared(CudaDevice(int(sys.argv[3])), *handles).hex() + "\n")
