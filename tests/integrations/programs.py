"""Programs of other frameworks, run as a user runs them: alone, under `fastps run`, under torchrun."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.support.example_programs import EXAMPLES
from tests.support.network.launched_nodes import port_below_ephemeral

TIMEOUT_S = 240


def command(way: str, file: Path, workers: int = 2, sync: str = "bsp") -> list[str]:
    """The command that runs a script in a way: "alone", "fastps run", "torchrun" or "accelerate launch"."""
    if way == "alone":
        return [sys.executable, str(file)]
    if way == "fastps run":
        return [sys.executable, "-m", "fastps.cli", "run", "-n", str(workers), "--sync", sync, str(file)]
    if way == "torchrun":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
        return [sys.executable, *launch, str(file)]
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_machines", "1", "--mixed_precision", "no"]
    return [sys.executable, *launch, "--dynamo_backend", "no", "--num_processes", str(workers), str(file)]


def run(words: list[str], folder: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a folder. Not in the repository's root: transformers would import its folder `kernels`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def program(text: str, folder: Path) -> Path:
    """A file with this text."""
    file = folder / "program.py"
    file.write_text(text)
    return file


def run_text(
    text: str, folder: Path, way: str = "fastps run", workers: int = 2, sync: str = "bsp", **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Run a program of this text in a folder, in a way of `command`."""
    return run(command(way, program(text, folder), workers, sync), folder, **variables)


def run_on_nodes(
    text: str, folder: Path, counts: Sequence[int], *arguments: str, way: str = "fastps run", **variables: str
) -> list["subprocess.CompletedProcess[str]"]:
    """Run a program on nodes of this machine with so many workers each; all nodes share the folder."""
    file, place = program(text, folder), f"127.0.0.1:{port_below_ephemeral()}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FASTPS_TIMEOUT": "120", **variables}
    host, _, port = place.partition(":")
    started = []
    for node, count in enumerate(counts):
        words = ["-m", "fastps", "run", "--nnodes", str(len(counts)), "--node-rank", str(node), "-n", str(count)]
        words += ["--rendezvous", place]
        if way == "torchrun":
            words = ["-m", "torch.distributed.run", "--nnodes", str(len(counts)), "--node-rank", str(node)]
            words += ["--master-addr", host, "--master-port", port, "--nproc-per-node", str(count)]
        command = [sys.executable, *words, str(file), *arguments]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, cwd=folder, env=environment, **pipes))
    try:
        with ThreadPoolExecutor(len(started)) as threads:
            outputs = list(threads.map(lambda each: each.communicate(timeout=TIMEOUT_S), started))
        return [
            subprocess.CompletedProcess(each.args, each.returncode, *output)
            for each, output in zip(started, outputs, strict=True)
        ]
    finally:
        for each in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def figures(way: str, example: str, folder: Path, *arguments: str, sync: str = "bsp") -> dict[str, Any]:
    """The figures that a program of examples/ writes at its end."""
    file = folder / "figures.json"
    words = [*command(way, EXAMPLES / example, sync=sync), *arguments, "--json", str(file)]
    ended = run(words, folder, FASTPS_SYNC=sync)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def changed_lines(plain: str, with_fastps: str) -> list[str]:
    """The lines of code that a program with fastps has, and its plain one has not; without docstring and empty lines."""
    before, after = (_code(EXAMPLES / name) for name in (plain, with_fastps))
    return [line for line in after if line not in before]


def _code(file: Path) -> list[str]:
    text = file.read_text().split('"""', 2)[2]
    return [line for line in text.splitlines() if line.strip()]
