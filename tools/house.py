"""The house, held: which folder may import which, how many files a folder has, how long files and functions are.

    python tools/house.py

import-linter checks the layers of fastps/ (pyproject.toml); this checks what it cannot see: cimports and includes of kernels/,
circles among compiled modules, sizes, and which files make a lane wait. A function over the limit needs a reason in
`LONG_FUNCTIONS`. Exit code 1 and one line for each finding.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 30  # in a folder, stubs and declaration files counted with their module
MOST_LINES = 500
MOST_FUNCTION_LINES = 60

# Which folders of kernels/ each one may import, cimport or include, itself aside.
KERNELS = {
    "base": set(),
    "scheduling": {"base"},
    "update": {"base"},
    "rows": {"base", "update"},
    "memory": {"base"},
    "tensors": set(),
    "collectives": {"base", "update"},
    "shm": {"base", "scheduling", "update", "rows"},
    "combining": {"base", "scheduling", "update", "rows", "shm"},
    "protocol": {"base", "scheduling", "update", "rows", "shm", "combining"},
    "cuda": {"update"},
    "simulation": {"base", "scheduling", "shm"},
    "baseline": {"base", "scheduling", "update", "rows", "shm", "combining", "protocol"},
    "chaos": {"base", "scheduling", "update", "rows", "memory", "shm", "combining", "protocol"},
}

# Functions over the limit: "file:function" and why it stays whole.
LONG_FUNCTIONS: dict[str, str] = {
    "fastps/cli/commands/run.py:run": "its signature is the command line, too",
    "fastps/cli/commands/simulation.py:simulate": "its signature is the command line: an option in each line, with its help",
}

# Calls in fastps/store and fastps/membership, and the files that may make them: a lane waits and combines in one place.
CALLS = {
    r"\blane\.try_combine\(": {"store/drive.py"},
    r"\brecover_lock\(": {"membership/membership.py"},
    r"\bsleep_ns\(": {
        "store/drive.py",
        "store/background.py",  # a thread without a lane of its own
        "store/jobs_of_process.py",  # after the worker has closed
        "store/reader.py",  # a reader has no lane
        "store/server_loop.py",  # before the server serves
        "store/server_process.py",  # the creator, for its server's first word
        "store/store.py",  # before the worker has its lane
        "membership/discovery.py",
        "membership/rendezvous.py",
    },
}

_CIMPORT = re.compile(
    r"^\s*(?:from\s+fastps\.kernels\.(\w+)(?:\.(\w+))?\s+c?import|c?import\s+fastps\.kernels\.(\w+)\.(\w+))", re.M
)
_INCLUDE = re.compile(r'(?:#include|extern from) "(\w+)/([\w.]+)"')
_CYTHON_FUNCTION = re.compile(r"^(\s*)(?:async\s+)?(?:cdef|cpdef|def)\s+(?!class\b|extern\b|struct\b|enum\b)[^=\n]*?(\w+)\s*\(")


def sources(folder: str, *suffixes: str) -> list[Path]:
    """The files of a folder of the checkout, those that a build made left out."""
    return sorted(
        path
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes and not any(part == "build" for part in path.parts)
    )


def kernel_arrows() -> Iterator[str]:
    """Imports, cimports and includes among the folders of kernels/ that the table does not allow."""
    for path in sources("kernels", ".pyx", ".pxd", ".pyi", ".py", ".h", ".hpp", ".cu"):
        room = path.relative_to(ROOT / "kernels").parts[0]
        if room not in KERNELS:
            continue
        text = path.read_text()
        found = {first or second for first, _, second, _ in _CIMPORT.findall(text)}
        found |= {folder for folder, _ in _INCLUDE.findall(text) if folder in KERNELS}
        for other in sorted(found - {room} - KERNELS[room]):
            yield f"{path.relative_to(ROOT)}: kernels/{room} may not import kernels/{other} (tools/house.py has the table)"
        if re.search(r"^\s*(?:from|import)\s+fastps\.(?!kernels\b)", text, re.M):
            yield f"{path.relative_to(ROOT)}: kernels/ imports nothing of fastps/"


def kernel_circles() -> Iterator[str]:
    """Circles among compiled modules."""
    graph: dict[str, set[str]] = {}
    for path in sources("kernels", ".pyx", ".pxd"):
        module = ".".join(path.relative_to(ROOT / "kernels").with_suffix("").parts)
        others = {f"{a or c}.{b or d}" for a, b, c, d in _CIMPORT.findall(path.read_text())}
        graph.setdefault(module, set()).update(others - {module})
    done: set[str] = set()

    def walk(module: str, above: tuple[str, ...]) -> Iterator[str]:
        if module in above:
            yield "circle: " + " -> ".join([*above[above.index(module) :], module])
            return
        if module in done:
            return
        for other in sorted(graph.get(module, ())):
            yield from walk(other, (*above, module))
        done.add(module)

    for module in sorted(graph):
        yield from walk(module, ())


def folder_sizes() -> Iterator[str]:
    """Folders with too many modules."""
    for top in ("fastps", "kernels", "tests", "bench"):
        for folder in {path.parent for path in sources(top, ".py", ".pyx", ".h", ".cu", ".hpp")}:
            stems = {path.stem for path in folder.iterdir() if path.suffix in (".py", ".pyx", ".pxd", ".h", ".cu", ".hpp")}
            if len(stems) > MOST_FILES:
                yield f"{folder.relative_to(ROOT)}: expected at most {MOST_FILES} modules in a folder, found {len(stems)}"


def file_sizes() -> Iterator[str]:
    """Files that are too long."""
    for top in ("fastps", "kernels", "bench"):
        for path in sources(top, ".py", ".pyx", ".pxd", ".pyi", ".h", ".hpp", ".cu"):
            lines = len(path.read_text().splitlines())
            if lines > MOST_LINES:
                yield f"{path.relative_to(ROOT)}: expected at most {MOST_LINES} lines, found {lines}"


def python_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a Python file and its lines, its docstring not counted: a contract may be as long as it has to be."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            skipped = (first.end_lineno or first.lineno) - first.lineno + 1 if documented else 0
            yield node.name, node.end_lineno - node.lineno + 1 - skipped


def cython_functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a Cython file and its lines: to the last line that is indented deeper than its head."""
    lines = path.read_text().splitlines()
    for number, line in enumerate(lines):
        head = _CYTHON_FUNCTION.match(line)
        if not head:
            continue
        last, in_signature = number, not line.rstrip().endswith(":")
        for later in range(number + 1, len(lines)):
            text = lines[later]
            if in_signature:
                in_signature = not text.rstrip().endswith(":")
                last = later
                continue
            if text.strip() and len(text) - len(text.lstrip()) <= len(head.group(1)):
                break
            last = later if text.strip() else last
        yield head.group(2), last - number + 1


def function_sizes() -> Iterator[str]:
    """Functions that are too long and have no reason."""
    for top in ("fastps", "kernels", "bench"):
        for path in sources(top, ".py", ".pyx"):
            functions = python_functions(path) if path.suffix == ".py" else cython_functions(path)
            for name, lines in functions:
                key = f"{path.relative_to(ROOT)}:{name}"
                if lines > MOST_FUNCTION_LINES and key not in LONG_FUNCTIONS:
                    yield f"{key}: expected at most {MOST_FUNCTION_LINES} lines, found {lines}; split it, or give its reason"


def calls() -> Iterator[str]:
    """Calls that a file may not make."""
    for path in [*sources("fastps/store", ".py"), *sources("fastps/membership", ".py")]:
        name = path.relative_to(ROOT / "fastps").as_posix()
        for pattern, allowed in CALLS.items():
            if name not in allowed and (found := re.search(pattern, path.read_text())):
                yield f"fastps/{name}: {found.group()}): expected only in {', '.join(sorted(allowed))} (see CALLS)"


def main() -> int:
    """Print what is out of order; 0 if nothing is."""
    found = [*kernel_arrows(), *kernel_circles(), *folder_sizes(), *file_sizes(), *function_sizes(), *calls()]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
