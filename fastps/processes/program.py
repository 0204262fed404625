"""The program that workers run: its kind and its imports, as found in its command and its source."""

import ast
import sys
import zipfile
from collections.abc import Sequence
from functools import cached_property
from itertools import dropwhile
from pathlib import Path

TORCH_IMPORTS = ("torch", "fastps.torch.optimizer")


class Program:
    """The command of a worker.

    >>> Program([sys.executable, "-m", "package.train", "--epochs", "3"]).arguments
    ['-m', 'package.train', '--epochs', '3']
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.arguments = self.command[1:]
        self._after_flags = list(dropwhile(lambda each: each.startswith("-") and each != "-m", self.arguments))
        self.is_module = self._after_flags[:1] == ["-m"]

    @property
    def can_fork(self) -> bool:
        """Whether a fork server can run the program: this interpreter, no flags, and a script's source or a module."""
        if self.command[0] != sys.executable or self._after_flags != self.arguments:
            return False
        if self.is_module:
            return len(self.arguments) > 1
        file = Path(*self.arguments[:1])
        return file.is_file() and file.suffix != ".pyc" and not zipfile.is_zipfile(file)

    @property
    def path(self) -> str:
        """The first entry of `sys.path`, as Python sets it."""
        return str(Path.cwd() if self.is_module else Path(self.arguments[0]).resolve().parent)

    @cached_property
    def texts(self) -> list[bytes]:
        """Return the source of a script, or of a module below the working directory."""
        if self.is_module:
            module = Path(*"".join(self._after_flags[1:2]).split("."))
            candidates = [module.with_suffix(".py"), module / "__main__.py"]
        else:
            candidates = [Path(argument) for argument in self._after_flags[:1]]
        try:
            return [path.read_bytes() for path in candidates if path.is_file()]
        except OSError:
            return []

    @property
    def imports(self) -> tuple[str, ...]:
        """The fork server's imports: torch, unless the source imports only the standard library."""
        try:
            roots = {root for text in self.texts for root in _imported_by(ast.parse(text))}
        except (SyntaxError, ValueError):
            return ()  # it runs nothing
        return () if self.texts and roots <= sys.stdlib_module_names else TORCH_IMPORTS


def _imported_by(tree: ast.Module) -> set[str]:
    """The first part of the name of each module that a program imports; "." stands for a package's own.

    >>> sorted(_imported_by(ast.parse("import os.path, numpy as np\\nfrom torch.nn import Linear")))
    ['numpy', 'os', 'torch']
    """
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots.add("." if node.level else (node.module or "").partition(".")[0])
    return roots
