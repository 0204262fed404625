"""Markers that a test's code tells: `process` where it starts processes, `torch` where it reads torch, `unit` for the rest.

A test's code is its function, its fixtures, and the functions of tests/ that these call.
"""

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

_STARTS_PROCESSES = {
    "subprocess", "multiprocessing", "fork", "Popen", "Launcher", "ForkedCrew", "LaunchedCrew", "ServerProcess", "compare",
    "spawn", "train",
}  # fmt: skip
_PROCESS_MODULES = ("subprocess", "multiprocessing", "tests.support.processes", "tests.support.commands")


def add_markers(item: pytest.Item) -> None:
    """Mark a collected test by what its code uses."""
    uses = set().union(*(_uses(function) for function in _functions_of(item)))
    folder = item.path.parent.name
    if "process" in uses or folder in ("clients", "crash", "integrations"):
        item.add_marker(pytest.mark.process)
    elif item.get_closest_marker("slow") is None and item.get_closest_marker("timing") is None:
        item.add_marker(pytest.mark.unit)
    if "torch" in uses or folder == "torch":
        item.add_marker(pytest.mark.torch)


def _functions_of(item: pytest.Item) -> Iterator[Callable[..., Any]]:
    if isinstance(item, pytest.Function):
        yield getattr(item.function, "hypothesis", types.SimpleNamespace(inner_test=item.function)).inner_test
        definitions = item._fixtureinfo.name2fixturedefs
        yield from (definition.func for found in definitions.values() for definition in found if _is_ours(definition.func))


def _is_ours(function: Callable[..., Any]) -> bool:
    return getattr(function, "__module__", "").startswith("tests") and not function.__module__.endswith("conftest")


@functools.cache
def _uses(function: Callable[..., Any]) -> frozenset[str]:
    """What a function uses, "process" and "torch", by itself and through the functions of tests/ that it names."""
    found: set[str] = set()
    seen: set[Any] = set()
    pending: list[Any] = [function]
    while pending:
        current = pending.pop()
        if current in seen or not hasattr(current, "__code__"):
            continue
        seen.add(current)
        for name in _names(current.__code__):
            value = current.__globals__.get(name)
            module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or ""
            if name in _STARTS_PROCESSES or module in _PROCESS_MODULES:
                found.add("process")
            if module.split(".")[0] == "torch":
                found.add("torch")
            if isinstance(value, type) and module.startswith("tests"):
                pending += [each for each in vars(value).values() if hasattr(each, "__code__")]
            elif module.startswith("tests") and callable(value):
                pending.append(getattr(value, "__wrapped__", value))
    return frozenset(found)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
