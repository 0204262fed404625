"""fastps doctor: what this machine offers to fastps, whether an arena works on it, and the memory that a model needs.

Every check is real: two workers step in a real arena, and one sleeps until the other wakes it. A model's needs are read from
the arena's own plan, not estimated.
"""

import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import psutil
import torch

from fastps.device.cuda import CudaDevice
from fastps.device.interface import DeviceError
from fastps.device.sharing import read_in_child, try_sharing
from fastps.errors import Error, UsageError
from fastps.job.layout import GRADIENT_NUMBERS, GradientType, Layout, place
from fastps.job.plan import plan
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, Rule, examples
from fastps.kernels.cuda.launch_args import fold_kernel
from fastps.kernels.shm.arena import Arena
from fastps.kernels.shm.format import format_memory
from fastps.kernels.update import fold
from fastps.store.store import Store
from fastps.system import shared_memory
from fastps.system.memory_limits import available_bytes
from fastps.torch.tensor_loops import why_not_compiled

OPTIMIZERS: dict[str, Rule] = {name: update.rule for name, update in examples().items()}
_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE = 128
_ADDRESSABLE_BYTES = 1 << 47  # by a process on x86-64
_MAP_NORESERVE = 0x4000  # on x86-64 and arm64; not every Python's mmap module defines it


@dataclass(frozen=True)
class Finding:
    """One line of the report: `value` for programs (bytes, a number or a text), `shown` for people."""

    name: str
    value: int | float | str | None
    shown: str
    ok: bool = True


def examine() -> list[Finding]:
    """Run all checks; each finding says whether fastps can work with it, and a failed check says why."""
    return [
        _cores(),
        *_memory(),
        _checked("memfd", _make_arena),
        _checked("futex", _futex),
        _checked("pidfd", _pidfd),
        _instruction_sets(),
        _torch(),
        *gpu_findings(),
        _checked("arena and workers", _two_workers_step),
    ]


def _checked(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, "works", check())
    except (Error, OSError) as error:
        return Finding(name, None, f"does not work: {error}", ok=False)


def _cores() -> Finding:
    cores, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    shown = f"{cores} for this process, of {machine} of the machine ({platform.machine()}, Linux {platform.release()})"
    return Finding("cores", cores, shown)


def _memory() -> list[Finding]:
    memory = psutil.virtual_memory()
    free, limit = available_bytes()
    return [
        Finding("memory", memory.total, f"{shown_bytes(memory.total)}, of which {shown_bytes(memory.available)} are available"),
        Finding("memory for an arena", free, f"{shown_bytes(free)}, by the {limit}", ok=free > 0),
    ]


def _torch() -> Finding:
    why = why_not_compiled()
    loops = "compiled loops over its tensors" if why is None else why
    shown = f"{torch.__version__}, {torch.get_num_threads()} threads in one process; {loops}"
    return Finding("torch", torch.__version__, shown)


def _instruction_sets() -> Finding:
    available = fold.instruction_sets()
    used = os.environ.get("FASTPS_ISA", "auto")
    used = available[-1] if used == "auto" else used
    return Finding("instruction sets", used, f"{', '.join(available)}; folds use {used}")


def _make_arena() -> str:
    size = 1 << 20
    descriptor = shared_memory.create(size, "a check")
    try:
        shared_memory.map_shared(descriptor)
    finally:
        os.close(descriptor)
    return f"{shown_bytes(size)} were made, sealed and mapped"


def _futex() -> str:
    """Wait for a word that has changed already: the kernel must answer EAGAIN."""
    number = _FUTEX_NUMBERS.get(platform.machine())
    if number is None:
        raise UsageError(f"expected x86-64 or arm64, found {platform.machine()}, whose system calls this check does not know")
    libc = ctypes.CDLL(None, use_errno=True)
    word = ctypes.c_uint32(1)
    outcome = libc.syscall(number, ctypes.byref(word), _FUTEX_WAIT_PRIVATE, 0, None, None, 0)
    if (outcome, ctypes.get_errno()) != (-1, errno.EAGAIN):
        raise OSError(ctypes.get_errno(), f"expected the kernel to refuse a wait (EAGAIN), found {outcome}")
    return "the kernel compares and waits"


def _pidfd() -> str:
    """Open a pidfd, by which workers learn of another's death."""
    os.close(os.pidfd_open(os.getpid()))
    return "a process can be watched for its death"


def _two_workers_step() -> str:
    """Step two workers of one job: worker 0 waits for worker 1's gradient until it sleeps. Raises Error, OSError."""
    weights = np.zeros(1000, np.float32)
    failures: list[BaseException] = []
    with Store.create({"weights": weights}, SGD(lr=1.0), sync="bsp", workers=2, timeout_s=20.0) as store:
        with store.attach(0) as first, store.attach(1) as second:

            def step(worker_rank: int) -> None:
                worker = (first, second)[worker_rank]
                try:
                    worker.gradients["weights"][:] = worker_rank + 1.0
                    worker.step()
                except BaseException as error:
                    failures.append(error)

            waiting = threading.Thread(target=step, args=(0,))
            waiting.start()
            waiting.join(0.02)  # long enough to go to sleep
            step(1)
            waiting.join()
            if failures:
                raise failures[0]
            found = sorted({float(value) for worker in (first, second) for value in worker.weights["weights"]})
    if found != [-1.5]:
        raise Error(f"expected weights of -1.5 after a step, found {found[:3]}: please report this, with the lines above")
    return "an arena was made, and two workers took a step together"


def gpu_findings() -> list[Finding]:
    """Return the findings on GPUs, one line if there is none. None fails: without a GPU or CuPy, jobs train on the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        return [Finding("GPUs", 0, "torch finds none, which is fine: fastps trains on the CPU")]
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    found = [
        Finding("GPUs", count, f"{count} ({names}); torch {torch.__version__}, CUDA {torch.version.cuda}"),
        _mps(),
    ]
    try:
        devices = [CudaDevice(index) for index in range(count)]
        devices[0].prepare(fold_kernel(fold.RULE_SGD, "float32"))
    except DeviceError as error:
        return [*found, Finding("shards on GPUs", "no", f"no, the fold runs on the CPU: {error}")]
    found.append(Finding("shards on GPUs", "yes", "a kernel was compiled and loaded"))
    if count > 1:
        found.append(peer_access(count, torch.cuda.can_device_access_peer))
    works, said = try_sharing(devices, read_in_child)
    return [*found, Finding("CUDA IPC", "works" if works else "no", said)]


def _mps() -> Finding:
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


@dataclass(frozen=True)
class Need:
    """A job's memory in bytes. All of it is shared: an arena exists once, and all workers map it.

    `spare_bytes` come on top of the total once a worker is stopped in the middle of a fold and the others go on without it.
    """

    parameters: int
    workers: int
    optimizer: str
    sync: str
    slots_per_worker: int
    gradient_slots_bytes: int
    weights_buffers: int
    weights_bytes: int
    rule_state_bytes: int
    control_bytes: int
    total_bytes: int
    spare_bytes: int

    @property
    def per_worker_bytes(self) -> int:
        """A worker's share of the total."""
        return -(-self.total_bytes // self.workers)


def need_of(parameters: int, workers: int, optimizer: str, sync: str = "bsp", dtype: str = "float32") -> Need:
    """Return the memory of such a job's arena, read from its plan; none is allocated. `dtype`: the type of the parameters.

    >>> need = need_of(1_000_000, 4, "momentum")
    >>> need.weights_buffers, need.slots_per_worker
    (7, 1)
    >>> need.rule_state_bytes // 1_000_000  # three buffers of one tensor of 4 bytes a parameter
    12

    Raises UsageError for an unknown optimizer, an unknown type or a number out of range, and PolicyError.
    """
    for name, choices, found in (("optimizer", OPTIMIZERS, optimizer), ("dtype", GRADIENT_NUMBERS, dtype)):
        if found not in choices:
            raise UsageError(f"--{name}: expected one of {', '.join(choices)}, found {found!r}")
    for name, value in {"model-size": parameters, "workers": workers}.items():
        if value < 1:
            raise UsageError(f"--{name}: expected at least 1, found {value}")
    policy = parse_policy(sync)
    policy.check_workers(workers)
    tensors = min(policy.shards, parameters)  # a shard ends at a parameter's end
    sizes = [parameters * (index + 1) // tensors - parameters * index // tensors for index in range(tensors)]
    kind = cast(GradientType, dtype)
    rows = [(f"tensor {index}", (size,), (1,), 0) for index, size in enumerate(sizes)]
    placed = place(rows, policy.shards, types=[kind] * tensors)
    return _measured(Layout(placed, 1, OPTIMIZERS[optimizer], policy, workers, gradient_type=kind), optimizer)


def _measured(layout: Layout, optimizer: str) -> Need:
    """Format an arena in reserved but untouched memory, and read where its parts begin."""
    refusal = f"--model-size: expected a model whose arena can be addressed, found {layout.buffer_floats:,} parameters"
    if 4 * layout.buffer_floats >= _ADDRESSABLE_BYTES:
        raise UsageError(refusal)
    try:
        header, total, ranges = plan(layout)
        needed = sum(length for _, length in ranges)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        memory = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError) as error:
        raise UsageError(f"{refusal} ({error})") from None
    format_memory(memory, header, layout.segments, shards=layout.shards, **layout.policy.values(layout.workers))
    arena = Arena(memory)
    slots = layout.workers * arena.slots * (arena.gradient_offset(0, 1) - arena.gradient_offset(0, 0))
    weights_begin, state_begin, extra_begin = arena.weights_offset(0), arena.steps_offset(0), arena.extra_offset(0)
    return Need(
        parameters=sum(parameter.size for parameter in layout.parameters),
        workers=layout.workers,
        optimizer=optimizer,
        sync=layout.policy.spec,
        slots_per_worker=arena.slots,
        gradient_slots_bytes=slots,
        weights_buffers=arena.buffers,
        weights_bytes=state_begin - weights_begin,
        rule_state_bytes=extra_begin - slots - state_begin,
        control_bytes=weights_begin + needed - extra_begin,
        total_bytes=needed,
        spare_bytes=sum(length for _, length in arena.spare_ranges()),
    )


def need_findings(need: Need) -> list[Finding]:
    """Return the findings on a model; the last one says whether it fits this machine now."""
    free, limit = available_bytes()
    fits = need.total_bytes <= free
    per_worker = f"{need.slots_per_worker} a worker, {shown_bytes(need.gradient_slots_bytes // need.workers)} each worker"
    verdict = "yes" if fits else "no: use fewer workers or a smaller model, or raise the limit"
    return [
        Finding("gradient slots", need.gradient_slots_bytes, f"{shown_bytes(need.gradient_slots_bytes)} ({per_worker})"),
        Finding("weights", need.weights_bytes, f"{shown_bytes(need.weights_bytes)} ({need.weights_buffers} buffers in all)"),
        Finding("rule state", need.rule_state_bytes, f"{shown_bytes(need.rule_state_bytes)} (for all workers)"),
        Finding("control words", need.control_bytes, shown_bytes(need.control_bytes)),
        Finding(
            "total", need.total_bytes, f"{shown_bytes(need.total_bytes)}, or {shown_bytes(need.per_worker_bytes)} a worker"
        ),
        Finding("spare", need.spare_bytes, f"{shown_bytes(need.spare_bytes)} more, once a worker is stopped in a fold"),
        Finding("fits", str(fits).lower(), f"{verdict}; {shown_bytes(free)} are free, by the {limit}", ok=fits),
    ]


def shown_bytes(size: int) -> str:
    """Format bytes with a fitting unit.

    >>> shown_bytes(3 << 29), shown_bytes(5 << 20), shown_bytes(4096)
    ('1.50 GiB', '5.0 MiB', '4.0 KiB')
    """
    for unit, factor, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if size >= factor:
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size} bytes"
