"""Run the command line without the two seconds in which Python imports torch: commands are forks of one process per session.

The forked process has the arguments, environment, folder and output files of one that was started by itself. A test that is
about the start (what is imported, limits that are set before) starts a process by itself.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from fastps.system import garbage
from tests.support import huge_pages

OF_A_JOB = ("RANK", "WORLD_SIZE", "FASTPS_JOB")  # variables that would make a command a worker of another job
_MAIN = "import runpy; runpy.run_module('fastps.cli', run_name='__main__', alter_sys=True)"
_servers: list["subprocess.Popen[str]"] = []


def fastps(*arguments: str, code: str = _MAIN, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run `fastps ARGUMENTS`, or `code` with these arguments, with `variables` in its environment; returns its output.

    It may take as long as the test may.
    """
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB} | variables
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        order = {"code": code, "arguments": arguments, "environment": environment, "folder": str(Path.cwd())}
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps({**order, "files": [str(file) for file in files]}) + "\n")
        server.stdin.flush()
        process_id = int(server.stdout.readline())
        try:
            exit_code = int(server.stdout.readline())
        except BaseException:  # pytest's timeout: the next test must not read this command's answer
            _servers.remove(server)
            _server.cache_clear()
            server.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(["fastps", *arguments], exit_code, *(file.read_text() for file in files))


def done(*arguments: str, **options: str) -> "subprocess.CompletedProcess[str]":
    """Like `fastps`, for a command that must succeed."""
    ended = fastps(*arguments, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


def rows(*arguments: str, **options: str) -> list[dict[str, Any]]:
    """The rows that a command writes as JSON, and succeeds."""
    found: list[dict[str, Any]] = json.loads(done(*arguments, "--json", "-", **options).stdout)["rows"]
    return found


def refused(*arguments: str, **options: str) -> str:
    """What a command says of wrong usage, which is one sentence, with exit code 2 and nothing else."""
    ended = fastps(*arguments, **options)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    return ended.stderr


def server_process_ids() -> list[int]:
    """The processes that commands are forked from; they end with the session."""
    return [server.pid for server in _servers]


@functools.cache
def _server() -> "subprocess.Popen[str]":
    program = f"import sys; sys.path[:] = {sys.path!r}; from tests.support.commands import serve; serve()"
    server = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    _servers.append(server)
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """Fork a process for each line of standard input; write its process id and, when it has ended, its exit code."""
    import torch
    import torch._dynamo  # the first optimizer of a process imports it

    import fastps.cli.main  # noqa: F401

    torch.set_num_threads(1)  # no thread of this process may be lost in a fork
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    garbage.freeze()  # so that a fork's collections leave shared pages alone
    huge_pages.collapse()
    for line in sys.stdin:
        order = json.loads(line)
        process_id = os.fork()
        if process_id == 0:
            os._exit(_become(order))
        print(process_id, flush=True)
        _, status = os.waitpid(process_id, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _become(order: dict[str, Any]) -> int:
    """Be the command; returns its exit code. Exit handlers run, and torch is not taken down, which takes a second."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor, file in enumerate(order["files"], start=1):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.close(nothing)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["fastps", *order["arguments"]]
    code: Any = 0
    try:
        exec(compile(order["code"], "<command>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
