"""What spawn hands to its workers, and what they report: files in memory that the processes inherit.

cloudpickle copies what the calling program itself defines (in a notebook's cells, as a lambda or a closure) with the names that
it uses. What a module defines goes by its name, and the worker imports it. Tensors are copied: multiprocessing's reductions,
which would move them into shared memory, take no part.
"""

import contextlib
import functools
import inspect
import linecache
import mmap
import os
import pickle
import sys
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import IO, Any, ClassVar

import cloudpickle

from fastps.errors import Error, UsageError
from fastps.system.processes import import_path

_COMPLETE = b"\1"


@dataclass(frozen=True)
class Setting:
    """The part of the caller's state that a worker needs before it unpickles its work."""

    path: list[str]  # sys.path
    argv: list[str]  # sys.argv
    sources: dict[str, list[str]]  # lines that no file has (a notebook's cells), by the names that tracebacks give them
    name: str  # the function's


@dataclass(frozen=True)
class Work:
    """A function, its arguments after the rank, and the model whose final state comes back."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    model: Any


@dataclass(frozen=True)
class Outcome:
    """What a worker reports."""

    state: Any = None  # the model's final state, from worker 0 if there is a model
    error: BaseException | None = None  # of a failed worker
    traceback: str = ""  # the error's


def _code(args: tuple[Any, ...], name: str) -> CodeType:
    return CodeType(*args).replace(co_filename=name)


def _reduced(code: CodeType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Keep the file's name, which cloudpickle replaces, so that a worker's tracebacks say where a function is."""
    _, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _code, (args, code.co_filename)


_Cached = type(functools.lru_cache(len))


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(fn)  # type: ignore[no-any-return]  # its type is its argument's


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    """Copies like cloudpickle, and notes the classes and functions of `__main__` by name."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduced}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.of_main: dict[str, Any] = {}

    def reducer_override(self, part: Any) -> Any:
        if isinstance(part, type | FunctionType) and part.__module__ == "__main__" and part.__qualname__ == part.__name__:
            self.of_main[part.__name__] = part
        if isinstance(part, _Cached) and part.__module__ == "__main__":  # pickle would look for it in the worker's `__main__`
            return _cached, (part.__wrapped__, part.cache_parameters())
        return super().reducer_override(part)


def name_of(fn: Any) -> str:
    """The name of a function, for messages.

    >>> name_of(len), name_of(3)
    ('len', '3')
    """
    return str(getattr(fn, "__qualname__", None) or repr(fn))


def memory_file(name: str) -> IO[bytes]:
    """A new file in memory. It ends with the last process that has it open."""
    return os.fdopen(os.memfd_create(f"fastps-{name}", os.MFD_CLOEXEC), "w+b")


def write(work: Work) -> IO[bytes]:
    """Return a new file with the work and the caller's setting. Raises UsageError if a part does not pickle."""
    file = memory_file("work")
    setting = Setting(import_path(), list(sys.argv), _cells(), name_of(work.fn))
    try:
        pickle.dump(setting, file)
        pickler = _Pickler(file)
        pickler.dump(work)
        pickler.dump(pickler.of_main)
    except Exception as error:
        file.close()
        culprit, reason = _culprit(work, error)
        to_do = "" if isinstance(reason, Error) else "; make it inside the function, or give start_method='fork'"
        raise UsageError(
            f"spawn cannot hand {setting.name!r} and its arguments over: expected what pickles, found {culprit}"
            f"{_in_a_line(reason)}{to_do}"
        ) from error
    file.flush()
    return file


def read(descriptor: int) -> tuple[Setting, Callable[[], Work]]:
    """Return the setting, and a function that unpickles the work. Other processes may read the same file at the same time.

    That function also makes a `__main__` with the caller's classes and functions, by whose names plain pickle finds them.
    """
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    setting: Setting = pickle.load(mapped)

    def load() -> Work:
        unpickler = pickle.Unpickler(mapped)
        work: Work = unpickler.load()
        main_module = ModuleType("__main__")
        main_module.__dict__.update(unpickler.load())
        sys.modules["__main__"] = main_module
        mapped.close()
        return work

    return setting, load


def _cells() -> dict[str, list[str]]:
    """Lines of source code that Python knows and no file has."""
    known = [(name, entry) for name, entry in list(linecache.cache.items()) if len(entry) == 4]
    return {name: list(entry[2]) for name, entry in known if not Path(name).exists()}


def remember(sources: dict[str, list[str]]) -> None:
    """Let tracebacks of this process show these lines."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def _culprit(work: Work, error: Exception) -> tuple[str, Exception]:
    """The first part of the work that does not pickle by itself, in words, and the reason."""
    for what, part in _parts(work):
        try:
            cloudpickle.dumps(part)
        except Exception as reason:
            return f"{what}: ", reason
    return "", error


def _parts(work: Work) -> Iterator[tuple[str, Any]]:
    for number, argument in enumerate(work.args):
        yield f"args[{number}], a {type(argument).__name__}", argument
    if work.model is not None:
        yield f"the model, a {type(work.model).__name__}", work.model
    if inspect.isfunction(work.fn):
        used = inspect.getclosurevars(work.fn)
        for name, value in {**used.globals, **used.nonlocals}.items():
            yield f"{name!r}, a {type(value).__name__} that the function uses", value


def _in_a_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def report(outcome: int, state: Any = None, error: BaseException | None = None) -> None:
    """Write what became of the work into the worker's file."""
    os.ftruncate(outcome, 0)
    with open(os.dup(outcome), "wb") as file:  # noqa: PTH123  (it has no path)
        file.seek(len(_COMPLETE))
        if error is None:
            pickle.dump(Outcome(state), file)
        else:
            frames = error.__traceback__ and error.__traceback__.tb_next  # the first frame is ours
            text = "".join(traceback.format_exception(type(error), error, frames))
            pickle.dump((_in_a_line(error), text), file)
            file.write(_pickled(error))
    os.pwrite(outcome, _COMPLETE, 0)


def _pickled(error: BaseException) -> bytes:
    """An exception as bytes; none if it does not survive that. The calling program's classes become its own again there.

    By its name if it has one, and by cloudpickle's number of the class if not.
    """
    kind = type(error)
    is_named = getattr(sys.modules.get(kind.__module__), kind.__qualname__, None) is kind
    for dumps in (pickle.dumps, cloudpickle.dumps) if is_named else (cloudpickle.dumps,):
        with contextlib.suppress(Exception):
            data: bytes = dumps(error)
            pickle.loads(data)
            return data
    return b""


def reported(file: IO[bytes]) -> Outcome | None:
    """What a worker has reported, after its end; None if it ended without a report."""
    if os.pread(file.fileno(), len(_COMPLETE), 0) != _COMPLETE:
        return None
    file.seek(len(_COMPLETE))
    first = pickle.load(file)
    if isinstance(first, Outcome):
        return first
    line, text = first
    try:
        error: BaseException = pickle.load(file)
    except Exception:  # it did not pickle, or its class cannot be imported here
        error = RuntimeError(line)
    return Outcome(None, error, text)
