"""MPI as a side of the benchmark: mpiexec of the package mpich starts the members, which connect back.

Between commands a member sleeps on its connection, not in MPI, so the other sides have the cores. Only members import MPI. Only
that package's MPI is used, because another build would give another figure.
"""

import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fastps.bench.crew import Crew, CrewError
from fastps.bench.peers import Job
from fastps.system.extras import how_to_install
from fastps.system.processes import die_with_parent

_START_S = 60.0
_END_S, _FAILED_END_S = 30.0, 3.0


def missing_reason() -> str | None:
    """Return why MPI cannot be measured here, or None."""
    for name, is_found in (("mpi4py", importlib.util.find_spec("mpi4py") is not None), ("mpich", _file("mpiexec") is not None)):
        if not is_found:
            return f"the package {name} is not installed: {how_to_install('peers')}"
    return None


def _file(name: str) -> Path | None:
    """Find a file of the package mpich by its name."""
    try:
        files = importlib.metadata.files("mpich") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == name), None)


class LaunchedCrew(Crew):
    """The workers of an MPI job. Raises CrewError if not all of them connect."""

    def __init__(self, job: Job, parameters: int) -> None:
        address = Path(job.folder) / "mpi"
        self._messages = Path(job.folder) / "mpi.stderr"
        library = _file("libmpi.so.12")
        arguments = [str(job.workers), str(parameters), job.folder, str(address)]
        with self._messages.open("wb") as messages, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(address))
            listener.listen(job.workers)
            listener.settimeout(0.1)
            self._process = subprocess.Popen(
                [str(_file("mpiexec")), "-n", str(job.workers), sys.executable, "-m", "fastps.bench.mpi_member", *arguments],
                env=os.environ | ({"MPI4PY_LIBMPI": str(library)} if library is not None else {}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=messages,
                preexec_fn=die_with_parent(os.getpid()),  # its members then end, too
            )
            try:
                super().__init__(self._connected(listener, job.workers))
            except BaseException:
                self._end(killed=True)
                raise

    def _connected(self, listener: socket.socket, size: int) -> "list[Connection[Any, Any]]":
        """Accept every member's connection; each sends its rank first."""
        found: dict[int, Connection[Any, Any]] = {}
        deadline_s = time.perf_counter() + _START_S
        while len(found) < size:
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                if self._process.poll() is not None or time.perf_counter() > deadline_s:
                    said = self._messages.read_text(errors="replace")[-500:].strip()
                    raise CrewError(f"of {size} members that mpiexec starts {len(found)} connected; it said: {said}") from None
                continue
            accepted.setblocking(True)
            connection: Connection[Any, Any] = Connection(accepted.detach())
            found[connection.recv()] = connection
        return [found[rank] for rank in range(size)]

    def _end(self, killed: bool) -> None:
        """Let members end by themselves first, also after a failure: a killed MPI leaves its shared memory behind."""
        try:
            self._process.wait(_FAILED_END_S if killed else _END_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()  # mpiexec then ends its members
            try:
                self._process.wait(_FAILED_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
