"""What a CUDA compiler makes of the fold, without a GPU: registers, spilled bytes, and instructions of PTX and machine code.

    python -m fastps.bench.gpu.machine_code sm_80 sm_90 sm_100

prints a table of registers. It needs nvcc. The figures hold for that compiler's version, and say nothing about speed. To read
machine code it also needs nvdisasm, which the package nvidia-cuda-nvdisasm brings.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fastps.kernels.cuda.runtime import OPTIONS, CudaUnavailableError, source

_RESOURCES = re.compile(
    r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)
_ENTRY = re.compile(r"\.entry (\w+)\(.*?^\}", re.DOTALL | re.MULTILINE)
_INSTRUCTION = re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.]+)", re.MULTILINE)
_CODE = re.compile(r"^\.text\.(\w+):$(.*?)(?=^//-{5}|\Z)", re.DOTALL | re.MULTILINE)
_OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """What one thread of a kernel needs: registers, and bytes of stack and of spilled registers, both in slow memory."""

    registers: int
    stack_bytes: int
    spilled_bytes: int


def resources(architecture: str, users: str = "") -> dict[str, Resources]:
    """Compile all kernels for an architecture such as "sm_90"; returns what each needs, by its name.

    `users`: the text of a user's rule; its kernels are compiled alone.

    Raises CudaUnavailableError without nvcc, and RuntimeError with its log if it rejects the source.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = _compile(Path(folder), users, f"-arch={architecture}", "-cubin", "-Xptxas", "-v")
    return {
        name: Resources(int(registers), int(stack), int(stored) + int(loaded))
        for name, stack, stored, loaded, registers in _RESOURCES.findall(log)
    }


def instructions(architecture: str, users: str = "") -> dict[str, list[str]]:
    """Compile all kernels to PTX for an architecture such as "compute_90"; returns the instructions of each, in their order.

    Raises as `resources`.
    """
    with tempfile.TemporaryDirectory() as folder:
        _compile(Path(folder), users, f"-arch={architecture}", "-ptx")
        text = (Path(folder) / "fold.out").read_text()
    return {found[1]: _INSTRUCTION.findall(found[0]) for found in _ENTRY.finditer(text)}


def machine_instructions(architecture: str, users: str = "") -> dict[str, list[str]]:
    """Compile all kernels for an architecture such as "sm_90"; returns the opcodes of each kernel's machine code, in order.

    Raises as `resources`, and CudaUnavailableError without nvdisasm.
    """
    reader = disassembler()
    if reader is None:
        raise CudaUnavailableError("expected nvdisasm, found none: pip install nvidia-cuda-nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        _compile(Path(folder), users, f"-arch={architecture}", "-cubin")
        text = subprocess.run([reader, "-c", f"{folder}/fold.out"], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {found[1]: _OPCODE.findall(found[2]) for found in _CODE.finditer(text)}


def disassembler() -> str | None:
    """The path of nvdisasm, on the PATH or in a folder of NVIDIA's Python packages; None if there is none."""
    package = importlib.util.find_spec("nvidia")
    folders = package.submodule_search_locations if package and package.submodule_search_locations else ()
    packaged = [str(path) for folder in folders for path in sorted(Path(folder).glob("*/bin/nvdisasm"))]
    return next(iter(packaged), shutil.which("nvdisasm"))


def _compile(folder: Path, users: str, *options: str) -> str:
    """Compile the joined source to fold.out in the folder; returns the compiler's log."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise CudaUnavailableError("expected nvcc on the PATH, found none: install the CUDA toolkit")
    (folder / "fold.cu").write_text(source(users))
    command = [compiler, *OPTIONS, *options, "-o", "fold.out", "fold.cu"]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc refused fold.cu: {done.stdout}")
    return done.stdout


def table(architectures: list[str]) -> str:
    """The registers of each kernel for each architecture, as a table in Markdown; spilled bytes behind a plus sign."""
    found = [resources(architecture) for architecture in architectures]
    lines = ["| kernel | " + " | ".join(architectures) + " |", "|---" * (len(architectures) + 1) + "|"]
    for name in found[0]:
        needs = [each[name] for each in found]
        cells = [f"{each.registers}{f' + {each.spilled_bytes}' if each.spilled_bytes else ''}" for each in needs]
        lines.append("| " + " | ".join([name.removeprefix("fps_").removeprefix("fold_"), *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(sys.argv[1:] or ["sm_80", "sm_90", "sm_100"]) + "\n")
