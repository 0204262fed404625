"""The spare: a process that imports what takes long once, and forks the replacement of each worker that is lost.

Run by the launcher as `python -m fastps.processes.spare MODULE...`, with a socket as standard input (spare_process.py is its
other end). A replacement is the launcher's own child, as every worker is: it is forked twice, and orphans come to the launcher.
Refuses to choose anything: without orders it does nothing, and it ends with the launcher.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from fastps.system.clock import SYSTEM_CLOCK
from fastps.system.processes import ask_to_die_with_parent

READY = b"ready"
MOST_BYTES = 1 << 17  # of an order
_ADOPTION_NS = 5_000_000_000


def serve(imports: list[str]) -> dict[str, Any] | None:
    """Import, then fork a replacement for each order. Returns, in the replacement, what to become; None at the end."""
    control = socket.socket(fileno=os.dup(0))
    launcher = os.getppid()
    _close_standard_input()
    for name in imports:
        importlib.import_module(name)
    if "torch" in sys.modules:
        _make_an_optimizer()
    gc.freeze()  # the replacements share these pages as long as nobody collects what lies there
    with contextlib.suppress(ConnectionError):  # no launcher any more: so says the next line
        control.send(READY)
    while True:
        message, files = _next_order(control)
        if not message:
            return None
        first = os.fork()
        if first == 0:
            if os.fork():
                os._exit(0)
            _begin_life(control, launcher, files)
            order: dict[str, Any] = json.loads(message)
            return order
        os.waitpid(first, 0)
        for file in files:
            os.close(file)


def _next_order(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next order and its files; nothing when the launcher has gone, also where it never read what it was told."""
    try:
        message, files, _, _ = socket.recv_fds(control, MOST_BYTES, 2)
    except ConnectionError:
        return b"", []
    return message, files


def _make_an_optimizer() -> None:
    """What torch imports when the first optimizer is made takes it as long as importing torch does."""
    import torch

    torch.optim.SGD([torch.zeros(1, requires_grad=True)])


def _begin_life(control: socket.socket, launcher: int, files: list[int]) -> None:
    """In the replacement: become the launcher's child, with the standard output and error that came, and say so."""
    os.setpgid(0, 0)
    deadline_ns = SYSTEM_CLOCK.now_ns() + _ADOPTION_NS
    while os.getppid() != launcher:
        if SYSTEM_CLOCK.now_ns() >= deadline_ns:
            os._exit(1)  # the launcher has gone
        SYSTEM_CLOCK.sleep_ns(500_000)
    ask_to_die_with_parent(launcher)
    for target, file in zip((1, 2), files, strict=True):
        os.dup2(file, target)
        os.close(file)
    gc.unfreeze()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # every process has its own; Python's own generator does so by itself
    control.send(str(os.getpid()).encode())
    control.close()


def become(order: dict[str, Any]) -> None:
    """Run the script or module as `python SCRIPT ARGUMENTS` or `python -m MODULE ARGUMENTS` would."""
    os.environ.update(order["environment"])
    for name in order["without"]:
        os.environ.pop(name, None)
    name, sys.argv = order["arguments"][0], list(order["arguments"])
    if order["module"]:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


def _close_standard_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is an order; a worker takes Ctrl-C as Python does
    _order = serve(sys.argv[1:])
    if _order is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        become(_order)
