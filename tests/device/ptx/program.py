"""PTX, the assembly of NVIDIA's compilers, as kernels of basic blocks: only what the fold's kernels need, and no more.

There are no barriers, no shared or local memory and no calls; a directive or a statement that is not understood is an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)[^{]*\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
_PARAMETER = re.compile(r"\.param\s+(?:\.align \d+\s+)?\.\w(\d+)\s+(\w+)(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+%(\w+)<\d+>")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


@dataclass(frozen=True)
class Instruction:
    """One instruction, such as `@!%p1 ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%rd1+16];`."""

    text: str
    op: str
    operands: tuple[str, ...]
    guard: str = ""  # the register of the predicate under which it runs
    is_negated: bool = False


@dataclass(frozen=True)
class Kernel:
    """A kernel: where in the launch's argument its parameters lie, the type of registers by the beginning of their names, and
    basic blocks with the labels of some.
    """

    name: str
    parameters: dict[str, int]
    registers: dict[str, str]
    blocks: tuple[tuple[Instruction, ...], ...]
    labels: dict[str, int]


@lru_cache(maxsize=8)
def kernels_of(text: str) -> dict[str, Kernel]:
    """The kernels of a module, by name. Raises ValueError for what is not understood.

    >>> text = ".visible .entry one(.param .u64 a)\\n{\\n.reg .b32 %r<2>;\\nmov.u32 %r1, %tid.x;\\nret;\\n}\\n"
    >>> kernel = kernels_of(text)["one"]
    >>> kernel.parameters, kernel.registers, [step.op for step in kernel.blocks[0]]
    ({'a': 0}, {'r': 'b32'}, ['mov.u32', 'ret'])
    """
    text = re.sub(r"//[^\n]*|^\s*\.(?:loc|file)\b[^\n]*", "", text, flags=re.MULTILINE)
    return {name: _kernel(name, parameters, body) for name, parameters, body in _ENTRY.findall(text)}


def _kernel(name: str, parameters: str, body: str) -> Kernel:
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for statement in _statements(body):
        if statement.endswith(":"):
            if blocks[-1]:
                blocks.append([])
            labels[statement[:-1]] = len(blocks) - 1
        elif not statement.startswith((".reg", ".pragma")):
            blocks[-1].append(_instruction(statement))
            if blocks[-1][-1].op.startswith(("bra", "ret")):
                blocks.append([])
    registers = {begin: kind for kind, begin in _REGISTERS.findall(body)}
    places, end = dict[str, int](), 0
    for bits, parameter, count in _PARAMETER.findall(parameters):
        places[parameter] = end
        end += int(bits) // 8 * int(count or 1)
    return Kernel(name, places, registers, tuple(map(tuple, blocks)), labels)


def _statements(body: str) -> Iterator[str]:
    """Statements without their semicolons, and labels with their colons."""
    for line in re.sub(r"(\$\w+:)", r"\1;", body).split(";"):
        statement = line.strip().removeprefix("{").strip()  # inline assembly has braces of its own
        statement = statement.removeprefix("}").strip()
        if statement:
            yield statement


def _instruction(statement: str) -> Instruction:
    found = _STATEMENT.fullmatch(statement)
    if found is None:
        raise ValueError(f"expected an instruction of PTX, found {statement!r}")
    negated, guard, op, operands = found.groups()
    return Instruction(" ".join(statement.split()), op, tuple(_OPERAND.findall(operands)), guard or "", bool(negated))
