"""fastps run --hosts: a node on each host, its output with the host's name, and all ended with the first failure or Ctrl-C."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from fastps.errors import UsageError
from fastps.processes.hosts import HostsLauncher, HostsOptions, variables_line
from fastps.system.ports import free_port
from tests.support.nodes import await_files
from tests.support.processes import await_stop, is_stopped
from tests.support.scripts import program

TRAIN = Path(__file__).parents[1] / "support" / "network" / "train_on_nodes.py"


@pytest.fixture
def runner(tmp_path: Path) -> str:
    """A command that takes the place of ssh: it runs the command line here, whatever the host."""
    script = tmp_path / "runner"
    script.write_text('#!/bin/sh\n[ "$1" = unreachable ] && { echo "no route to $1" >&2; exit 255; }\nexec sh -c "$2"\n')
    script.chmod(0o755)
    return str(script)


def _start(ssh: str, hosts: str, script: Path | str, *options: str, folder: Path | None = None) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "fastps", "run", "--hosts", hosts, "--rendezvous", f"127.0.0.1:{free_port()}", *options]
    return subprocess.Popen(
        [*command, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder,
        env={**os.environ, "FASTPS_SSH": ssh, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )  # fmt: skip


ON_HOST = [sys.executable, "-m", "fastps.processes.on_host", "40", sys.executable, "-c"]
SHOW = """
import os, pathlib
secret = os.environ["FASTPS_SECRET"]
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        assert secret.encode() not in file.read_bytes(), file
    except OSError:
        pass
print(os.getcwd(), *(os.environ[name] for name in ("FASTPS_RANK", "FASTPS_NODE_RANK", "FASTPS_NNODES")), secret)
"""


@pytest.mark.slow
def test_each_host_is_a_node_in_the_same_folder_and_the_secret_is_in_no_arguments_of_any_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTPS_SECRET", "only-the-nodes-know-this")
    ssh, script, folder = tmp_path / "ssh", tmp_path / "show.py", tmp_path / "a folder"
    ssh.write_text('#!/bin/sh\nsh -c "$2"\nexit $?\n')  # its arguments stay visible, as ssh's do
    ssh.chmod(0o755)
    script.write_text(SHOW)
    folder.mkdir()
    process = _start(str(ssh), "me@one,two", script, "-n", "2", folder=folder)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    places = ["me@one [0]", "me@one [1]", "two [2]", "two [3]"]
    expected = [f"{place} {folder} {rank} {rank // 2} 2 only-the-nodes-know-this" for rank, place in enumerate(places)]
    assert sorted(out.splitlines()) == expected


@pytest.mark.slow
def test_the_first_failure_ends_all_hosts_and_is_named(runner: str, tmp_path: Path) -> None:
    text = "import os, sys, time\nsys.exit(7) if os.environ['FASTPS_RANK'] == '1' else time.sleep(300)"
    process = _start(runner, "one,two", program(tmp_path, text)[1])
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "two: exit code 1: see its output above" in " ".join(errors.split())


@pytest.mark.slow
def test_a_host_that_ssh_does_not_reach_is_named_and_ends_the_others(runner: str, tmp_path: Path) -> None:
    began = time.monotonic()
    process = _start(runner, "one,unreachable", program(tmp_path, "import time\ntime.sleep(300)")[1])
    _, errors = process.communicate(timeout=100)
    text = " ".join(errors.split())
    assert process.returncode == 1
    assert "unreachable: ssh could not run the command there (no route to unreachable)" in text
    assert "unreachable true` to work without a question; check the host's name and the keys" in text
    assert time.monotonic() - began < 30


def _waiting(ssh: str, hosts: str, folder: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    """A job of two workers that wait until there is a file, and the process ids of the workers."""
    script = folder / "wait.py"
    script.write_text(
        f"import os, pathlib, time\npathlib.Path({str(folder)!r}, f'came{{os.getpid()}}').touch()\n"
        f"while not pathlib.Path({str(folder)!r}, 'end').exists(): time.sleep(0.02)"
    )
    process = _start(ssh, hosts, script)
    await_files(folder, 2, 100, "came*")
    return process, [int(file.name.removeprefix("came")) for file in folder.glob("came*")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_after_the_end_of_the_command(runner: str, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, and a killed command, whose hosts notice that their input has ended."""
    process, _ = _waiting(runner, "one,two", tmp_path)
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=20)
    assert alive == []


def test_the_first_host_is_the_rendezvous_and_variables_of_fastps_go_along() -> None:
    options = HostsOptions.of("me@node0,node1", "")
    assert options.rendezvous == "node0:29400"
    assert HostsOptions.of("fd00::1,node1", "").rendezvous == "[fd00::1]:29400"
    command = options.command(1, ["-n", "4", "a b.py"])
    assert command[:4] == ["ssh", "-o", "BatchMode=yes", "node1"]
    assert "--nnodes 2 --node-rank 1 --rendezvous node0:29400 -n 4 'a b.py'" in command[4]
    assert variables_line({"FASTPS_SYNC": "ssp:3", "HOME": "/x"}) == b'{"FASTPS_SYNC": "ssp:3"}\n'


def _on_host(code: str, line: bytes) -> "subprocess.CompletedProcess[bytes]":
    command = [*ON_HOST, code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(line)
        process.stdin.close() if not line else process.stdin.flush()
        out, errors = process.stdout.read(), process.stderr.read()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def test_a_host_takes_the_variables_from_standard_input_and_its_command_gets_none_of_it() -> None:
    names = {"FASTPS_SECRET": "several\nlines = 'and \u00bd'", "FASTPS_SYNC": "\udcff"}
    code = "import json, os, sys\nprint(json.dumps({name: os.environ[name] for name in ('FASTPS_SECRET', 'FASTPS_SYNC')}))\n"
    ended = _on_host(code + "print(repr(sys.stdin.read()))", variables_line({**names, "HOME": "/x"}))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.decode().splitlines() == [json.dumps(names), "''"]


def test_a_host_passes_signals_on_and_ends_its_command_at_the_end_of_the_input() -> None:
    code = (
        "import signal, sys, time\nend = []\nsignal.signal(signal.SIGINT, lambda number, frame: end.append(number))\n"
        "signal.signal(signal.SIGUSR1, lambda number, frame: print('warned', flush=True))\nprint('ready', flush=True)\n"
        "while not end: time.sleep(0.01)\nprint('ended')\n"
    )
    command = [*ON_HOST, code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(variables_line({}))
        process.stdin.flush()
        assert process.stdout.readline() == b"ready\n"
        process.stdin.write(b"%d\n" % signal.SIGUSR1)
        process.stdin.flush()
        assert process.stdout.readline() == b"warned\n"
        process.stdin.close()
        assert process.stdout.read() == b"ended\n"
    assert process.returncode == 0


@pytest.mark.slow
def test_sigterm_lets_the_workers_of_all_hosts_save(runner: str, tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\nrank = os.environ['FASTPS_RANK']\ndef save(number, frame):\n    time.sleep(3)\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'saved{{rank}}').touch()\n    sys.exit()\nsignal.signal(signal.SIGTERM, save)\n"
        f"pathlib.Path({str(tmp_path)!r}, f'came{{rank}}').touch()\ntime.sleep(300)"
    )
    process = _start(runner, "one,two", script)
    await_files(tmp_path, 2, 100, "came*")
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 143, errors
    assert len(list(tmp_path.glob("saved*"))) == 2, errors


@pytest.mark.slow
def test_ctrl_z_stops_the_workers_of_all_hosts_and_sigcont_wakes_them(runner: str, tmp_path: Path) -> None:
    process, workers = _waiting(runner, "one,two", tmp_path)
    process.send_signal(signal.SIGTSTP)
    for each in [*workers, process.pid]:
        await_stop(each)
    (tmp_path / "end").touch()
    time.sleep(0.1)
    assert all(is_stopped(worker) for worker in workers)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors


@pytest.mark.parametrize("line", [b"", b"no JSON\n", b"[1, 2]\n"])
def test_a_host_that_gets_no_variables_says_so_and_starts_nothing(line: bytes) -> None:
    ended = _on_host("print('started')", line)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"expected the job's variables as the first line of standard input" in ended.stderr


def test_more_variables_than_ssh_may_leave_unread_are_refused(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs_nothing = HostsLauncher(HostsOptions.of("one,two", f"sh -c 'exec sleep 60' {tmp_path}"), ["x.py"])
    monkeypatch.setenv("FASTPS_SYNC", "x" * 100_000)
    monkeypatch.setenv("FASTPS_JOB", "x" * 100_000)
    with pytest.raises(UsageError, match=r"to take at most \d+ bytes, found 200\d\d\d: unset"):
        runs_nothing.run()


# -- over a real sshd ----------------------------------------------------------------------------------------------------


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[str]:
    """A real sshd on loopback with keys of its own; the ssh command that reaches it without a question."""
    search = os.pathsep.join([os.environ["PATH"], "/usr/sbin"])
    program, client, keygen = (shutil.which(name, path=search) for name in ("sshd", "ssh", "ssh-keygen"))
    if program is None or client is None or keygen is None:
        pytest.skip("OpenSSH's server, client and ssh-keygen are not all installed")
    for name in ("host", "user"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    port = free_port()
    config = tmp_path / "sshd_config"
    config.write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\n"
        f"PidFile none\nStrictModes no\nPermitRootLogin yes\nPasswordAuthentication no\nUsePAM no\n"
    )
    with (tmp_path / "sshd.log").open("w") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", str(config)], stderr=log)
    try:
        if not _answers(process, port):
            pytest.skip(f"sshd does not run here: {(tmp_path / 'sshd.log').read_text().strip()}")
        options: Sequence[str] = (
            *("-p", str(port), "-i", str(tmp_path / "user"), "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no"),
            *("-o", f"UserKnownHostsFile={tmp_path}/known", "-o", "IdentitiesOnly=yes", "-F", "none", "-l", getpass.getuser()),
        )
        yield " ".join([client, *options])
    finally:
        process.terminate()
        process.wait(10)


def _answers(process: "subprocess.Popen[bytes]", port: int) -> bool:
    deadline = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return True
        except OSError:
            time.sleep(0.05)
    return False


@pytest.mark.slow
def test_a_job_trains_over_a_real_ssh(sshd: str) -> None:
    process = _start(sshd, "127.0.0.1,localhost", TRAIN, "-n", "2")
    out, errors = process.communicate(timeout=90)
    assert process.returncode == 0, errors
    places = ["127.0.0.1 [0]", "127.0.0.1 [1]", "localhost [2]", "localhost [3]"]
    expected = [f"{place} {rank} of 4 node{rank // 2}:2" for rank, place in enumerate(places)]
    assert [" ".join(line.split()[:6]) for line in sorted(out.splitlines())] == expected
    assert len({line.split()[-1] for line in out.splitlines()}) == 1, "one model"


@pytest.mark.slow
def test_ctrl_c_ends_hosts_over_a_real_ssh(sshd: str, tmp_path: Path) -> None:
    process, workers = _waiting(sshd, "127.0.0.1,localhost", tmp_path)
    found = [psutil.Process(worker) for worker in workers]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    _, alive = psutil.wait_procs(found, timeout=20)
    assert alive == []
