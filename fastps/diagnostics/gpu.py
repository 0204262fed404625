"""The checks of `fastps doctor` for GPUs: which there are, whether processes can share memory, and peer access.

The check of sharing is real: this process allocates and records an event, another opens both handles and reads. Nothing here is
a failure: a machine without a GPU trains on the CPU, and one without CuPy folds there.
"""

import subprocess
import sys

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
        found.append(_peer_access(count))
    try:
        found.append(Finding("CUDA IPC", "works", _share_memory()))
    except (DeviceError, OSError, subprocess.SubprocessError) as error:
        found.append(Finding("CUDA IPC", "no", f"does not work, use FASTPS_PLACEMENT=host: {error}"))
    return found


def _peer_access(count: int) -> Finding:
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    reached = [pair for pair in pairs if torch.cuda.can_device_access_peer(*pair)]
    shown = "all reach each other" if len(reached) == len(pairs) else f"{len(reached)} of {len(pairs)} pairs: {reached}"
    return Finding("peer access", len(reached), shown)


def _share_memory() -> str:
    """Write a text on GPU 0 and let another process read it through its handles. Raises DeviceError."""
    device = CudaDevice()
    try:
        stream, event, address = device.make_stream(), device.make_event(), device.allocate(256)
        staging = device.host_memory(len(_WORDS))
        staging[:] = memoryview(_WORDS)
        device.copy(address, staging.ctypes.data, len(_WORDS), stream)
        device.record(event, stream)
        handles = [device.export(address).hex(), device.export_event(event).hex()]
        done = subprocess.run(
            [sys.executable, "-m", "fastps.diagnostics.gpu", *handles],
            capture_output=True,
            text=True,
            timeout=_CHILD_S,
            check=False,
        )
        device.synchronize(stream)
    finally:
        device.shut()
    if done.returncode:
        raise DeviceError((done.stderr.strip().splitlines() or ["the other process ended without a word"])[-1])
    return "another process opened memory and an event of this one, and read what was written"


def read_shared(memory_handle: bytes, event_handle: bytes) -> bytes:
    """Return the contents of another process's memory after its event."""
    device = CudaDevice()
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
    if read_shared(bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2])) != _WORDS:
        sys.exit("the memory that was opened holds something else")
