"""The fork server of a job: a process that imports torch once and forks the job's workers; and the launcher's connection to it.

The launcher runs `main` in a new interpreter, with one end of a socket. A worker is the launcher's own child: the fork server
forks twice, and the launcher adopts the orphan. A forked worker has what `python SCRIPT` has: `__main__`, `sys.argv`,
`sys.path[0]`, environment, streams, signal handlers, exit code and exit handlers.
"""

import builtins
import contextlib
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from fastps.system import garbage
from fastps.system.clock import SYSTEM_CLOCK, Clock
from fastps.system.processes import AdoptedProcess, ask_to_die_with_parent, note_fork

READY = b"ready"
MAX_MESSAGE_BYTES = 1 << 17
# The first entry of sys.path is set before anything is imported, so that no module of the working directory hides another.
PROGRAM = """\
import sys
path = sys.argv.pop(1)
if not sys.flags.safe_path:
    sys.path[0] = path
from fastps.processes.forkserver import main
main()
"""
_ADOPTION_NS = 5_000_000_000
_IMPORT_NS = 120_000_000_000  # the longest time for the imports
_ANSWER_S = 2.0  # a fork takes milliseconds; a stopped fork server never answers


def main() -> None:
    """Import the modules of `sys.argv[2:]`, then serve the launcher at the socket with the descriptor `sys.argv[1]`."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # by the launcher's shell, and so in each worker
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        order = serve(control, sys.argv[2:])
    if order is None:
        os._exit(0)  # skip exit handlers: the imported modules were not used
    if not is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run_program(order)


def serve(control: socket.socket, imports: list[str]) -> dict[str, Any] | None:
    """Import, then fork a worker for each order. Returns the order in the worker, and None at the end."""
    launcher = os.getppid()
    for name in imports:
        with contextlib.suppress(Exception):  # the script meets the same error, and may expect it
            importlib.import_module(name)
    if "torch" in sys.modules:
        _make_an_optimizer()
    sys.stdout.flush()
    sys.stderr.flush()
    garbage.freeze()  # in the workers, too: a collection would copy the pages of all imports, and one runs at each exit
    with contextlib.suppress(ConnectionError):  # the launcher has ended: the next receive reports it
        control.send(_obstacle().encode() or READY)
    while True:
        try:
            message, files, _, _ = socket.recv_fds(control, MAX_MESSAGE_BYTES, 2)
        except ConnectionError:
            message = b""
        if not message:  # the launcher has closed its end
            return None
        first = os.fork()
        if first == 0:
            if os.fork():
                os._exit(0)
            _begin_life(control, launcher, files)
            order: dict[str, Any] = json.loads(message)
            if not order["reads"]:
                os.dup2(nowhere := os.open(os.devnull, os.O_RDONLY), 0)
                os.close(nowhere)
            return order
        os.waitpid(first, 0)
        for file in files:
            os.close(file)


def _obstacle() -> str:
    """Return why this process cannot fork workers; empty if it can."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "an import has initialized CUDA, which does not survive a fork"
    if threading.active_count() > 1:
        names = ", ".join(thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
        return f"an import has started a thread ({names}), which does not survive a fork"
    return ""


def _make_an_optimizer() -> None:
    """Import the modules that torch imports with the first optimizer; they take as long as torch itself."""
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def _begin_life(control: socket.socket, launcher: int, files: list[int]) -> None:
    """In the worker: become the launcher's child, take the order's standard streams, and answer with the process number."""
    os.setpgid(0, 0)
    note_fork(may_have_computed=False)
    deadline_ns = SYSTEM_CLOCK.now_ns() + _ADOPTION_NS
    while os.getppid() != launcher:
        if SYSTEM_CLOCK.now_ns() >= deadline_ns:
            os._exit(1)  # the launcher has ended
        SYSTEM_CLOCK.sleep_ns(500_000)
    ask_to_die_with_parent(launcher)
    for target, file in zip((1, 2), files, strict=bool(files)):  # none: the output goes where this process's goes
        os.dup2(file, target)
        os.close(file)
    seed_generators()
    control.send(str(os.getpid()).encode())
    control.close()


def seed_generators() -> None:
    """Seed the worker's generators anew, as in a new process. Python's own generator reseeds itself after a fork."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


def run_program(order: dict[str, Any]) -> None:
    """Run the program as `python ARGUMENTS` does. An exception's traceback begins at the program's own frames."""
    os.environ.update(order["environment"])
    for name in order["without"]:
        os.environ.pop(name, None)
    arguments: list[str] = order["arguments"]
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = list(arguments)
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=builtins)
    try:
        if arguments[0] == "-m":
            del sys.argv[1]  # runpy puts the module's file in place of "-m"
            runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
        else:
            file = str(Path(arguments[0]).absolute())
            loader = SourceFileLoader("__main__", file)
            main_module.__dict__.update(__cached__=None, __file__=file, __loader__=loader, __package__=None, __spec__=None)
            with io.open_code(file) as stream:
                source = stream.read()
            exec(compile(source, file, "exec"), main_module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        hook, sys.excepthook = sys.excepthook, lambda *reported: None
        own = error.__traceback__
        hook(type(error), error, error.with_traceback(own and own.tb_next).__traceback__)
        raise  # the interpreter ends as after any exception: exit code 1, or SIGINT after KeyboardInterrupt


class ForkServer:
    """The launcher's side: `command` starts the server, with `environment`, and inherits the socket `inherited`."""

    def __init__(self, environment: Mapping[str, str], path: str, imports: Sequence[str]) -> None:
        # `control` is readable once the fork server has something to say.
        self.control, self.inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment = environment
        self.command = [sys.executable, "-c", PROGRAM, path, str(self.inherited.fileno()), *imports]
        self.refusal = ""  # why it forks no worker
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        """Whether its imports are done and it waits for orders."""
        if not self._is_ready and not self.refusal:
            with contextlib.suppress(BlockingIOError):
                try:
                    message = self.control.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError:
                    message = b""
                self._is_ready = message == READY
                self.refusal = "" if self._is_ready else message.decode() or "it has ended"
        return self._is_ready

    def await_ready(self, is_over: Callable[[], bool], pause: Callable[[], object], clock: Clock) -> None:
        """Call `pause` until the imports are done. If they take too long, that is the refusal."""
        deadline_ns = clock.now_ns() + _IMPORT_NS
        while not (self.is_ready or self.refusal or is_over()):
            pause()
            if clock.now_ns() >= deadline_ns:
                self.refusal = "out of time"

    def fork(
        self, environment: Mapping[str, str], arguments: Sequence[str], *, captured: bool = True, reads: bool = False
    ) -> AdoptedProcess | None:
        """Fork a worker that runs `python ARGUMENTS`. Returns None if the fork server forks none in time.

        If its output is not `captured`, it goes where the fork server's own goes. `reads`: whether it has the fork server's
        standard input, or none.
        """
        message = json.dumps(
            {
                "environment": {key: value for key, value in environment.items() if self.environment.get(key) != value},
                "without": [key for key in self.environment if key not in environment],
                "arguments": list(arguments),
                "reads": reads,
            }
        ).encode()
        if len(message) > MAX_MESSAGE_BYTES:
            return None
        pipes = [os.pipe(), os.pipe()] if captured else []
        readers = [reader for reader, _ in pipes]
        try:
            self.control.settimeout(_ANSWER_S)
            socket.send_fds(self.control, [message], [writer for _, writer in pipes])
            process_id = int(self.control.recv(32))
        except (OSError, ValueError):  # it has ended, or does not answer
            for reader in readers:
                os.close(reader)
            return None
        finally:
            for _, writer in pipes:
                os.close(writer)
        streams = [cast("IO[bytes]", os.fdopen(reader, "rb", buffering=0)) for reader in readers]
        return AdoptedProcess(process_id, *streams)

    def close(self) -> None:
        """Close the socket: the fork server ends when it reads the end of its orders."""
        self.control.close()
