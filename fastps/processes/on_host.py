"""Runs a command on a host of `fastps run --hosts`, and ends it when standard input ends: ssh has gone, or the job is over.

The first line of standard input has the command's variables, which no argument may show. Each other line is the number of a
signal for the command, since ssh passes none on. At the end of the input the command gets SIGINT, and SIGKILL if it then takes
too long.
"""

import json
import os
import selectors
import signal
import subprocess
import sys

from fastps.system.processes import start_child

_LONGEST_LINE = 1 << 20


def main() -> int:
    """Run the command `sys.argv[2:]`, which may take `sys.argv[1]` seconds to end.

    Returns its exit code; 128 and the signal's number for one that a signal ended.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is ignored, a child that has ended has no exit code
    process = start_child(sys.argv[2:], env={**os.environ, **_variables()})
    ended = os.pidfd_open(process.pid)
    with selectors.DefaultSelector() as selector:
        selector.register(ended, selectors.EVENT_READ)
        selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
        rest = b""
        while ended not in [key.fd for key, _ in selector.select()]:
            data = os.read(sys.stdin.fileno(), 65536)
            *numbers, rest = (rest + data).split(b"\n")
            for number in numbers:
                process.send_signal(int(number))
            if not data:
                _end(process, float(sys.argv[1]))
                break
    os.close(ended)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _variables() -> dict[str, str]:
    """Read the first line of standard input, and nothing behind it."""
    line = b""
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and (data := os.read(sys.stdin.fileno(), 1)):
        line += data
    try:
        variables = json.loads(line)
        return {str(name): str(value) for name, value in variables.items()}
    except (ValueError, AttributeError):
        sys.exit(
            "fastps: expected the job's variables as the first line of standard input, found none: is fastps on this host of"
            " the same version, and does the command of --ssh-command pass standard input on?"
        )


def _end(process: "subprocess.Popen[bytes]", limit_s: float) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main())
