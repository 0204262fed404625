"""The checks of `fastps doctor` for GPUs: which there are, whether processes can share memory, and peer access.

The check of sharing is real: this process allocates and records an event on each GPU, and another, one for each GPU, opens all
handles and reads. Nothing here is a failure: a machine without a GPU trains on the CPU, and one without CuPy folds there.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

import psutil
import torch

from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.diagnostics.finding import Finding
from fastps.kernels.cuda.launch_args import fold_kernel
from fastps.kernels.update.fold import RULE_SGD

Handles = tuple[bytes, bytes]
"""Of memory, and of the event behind what was written to it."""
_WORDS = b"fastps!!" * 8
_CHILD_S = 60.0


def gpu_findings() -> list[Finding]:
    """Return the findings on GPUs: one line if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [Finding("GPUs", 0, "torch finds none, which is fine: fastps trains on the CPU")]
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    found = [
        Finding("GPUs", count, f"{count} ({names}); torch {torch.__version__}, CUDA {torch.version.cuda}"),
        sharing_of_time(),
    ]
    try:
        devices = [CudaDevice(index) for index in range(count)]
        devices[0].prepare(fold_kernel(RULE_SGD, "float32"))
    except DeviceError as error:
        return [*found, Finding("shards on GPUs", "no", f"no, the fold runs on the CPU: {error}")]
    found.append(Finding("shards on GPUs", "yes", "a kernel was compiled and loaded"))
    if count > 1:
        found.append(peer_access(count, torch.cuda.can_device_access_peer))
    return [*found, sharing(devices, _in_child)]


def sharing_of_time() -> Finding:
    """Whether the daemon of MPS runs, without which the kernels of several processes on one GPU take turns."""
    if any(process.info["name"] == "nvidia-cuda-mps-control" for process in psutil.process_iter(["name"])):
        return Finding("MPS", "yes", "runs: kernels of several workers on one GPU run side by side")
    return Finding("MPS", "no", "does not run: several workers on one GPU take turns; `nvidia-cuda-mps-control -d` starts it")


def peer_access(count: int, reaches: Callable[[int, int], bool]) -> Finding:
    """Which of the pairs of GPUs have peer access. `reaches`: whether one reads another's memory."""
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    reached = [pair for pair in pairs if reaches(*pair)]
    one_way = [pair for pair in reached if pair[::-1] not in reached]
    shown = "all reach each other" if len(reached) == len(pairs) else f"{len(reached)} of {len(pairs)} pairs: {reached}"
    if one_way:
        shown += f"; {one_way} in one direction only, which jobs on these GPUs refuse: use FASTPS_PLACEMENT=host"
    elif len(reached) < len(pairs):
        shown += "; jobs on the others need FASTPS_PLACEMENT=host"
    return Finding("peer access", len(reached), shown)


def sharing(devices: Sequence[CudaDevice], read: Callable[[int, Sequence[Handles]], list[str]]) -> Finding:
    """Whether another process opens memory and an event of each GPU on each GPU.

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
        return Finding("CUDA IPC", "no", f"does not work, use FASTPS_PLACEMENT=host: {next(iter(own.values()))}")
    if failed:
        pairs, text = list(failed), next(iter(failed.values()))
        return Finding("CUDA IPC", "works", f"works on each GPU; not from one to another for (owner, reader) {pairs}: {text}")
    everywhere = "" if count == 1 else f", for all {count * count} pairs of GPUs"
    return Finding("CUDA IPC", "works", f"another process opened memory and an event of this one, and read them{everywhere}")


def share(device: CudaDevice) -> Handles:
    """Write a text on a GPU; returns the handles of its memory and of the event behind it. Raises DeviceError."""
    stream, event, address = device.make_stream(), device.make_event(), device.allocate(256)
    staging = device.host_memory(len(_WORDS))
    staging[:] = memoryview(_WORDS)
    device.copy(address, staging.ctypes.data, len(_WORDS), stream)
    device.record(event, stream)
    return device.export(address), device.export_event(event)


def _in_child(reader: int, handles: Sequence[Handles]) -> list[str]:
    """Read by handles in a process of its own, on one of the GPUs. Raises DeviceError with that process's last words."""
    texts = [handle.hex() for pair in handles for handle in pair]
    command = [sys.executable, "-m", "fastps.diagnostics.gpu", str(reader), *texts]
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
        found = sharing([CudaDevice()], _in_child)
    except DeviceError as error:
        found = Finding("CUDA IPC", "no", str(error))
    print(found.shown)
    return int(found.value == "no")


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
