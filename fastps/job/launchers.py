"""Launchers of several processes, as data: the variables by which each tells a process which one it is.

`fastps run` and torchrun keep a store in which the nodes meet. The others, `srun` and the launchers of MPI, only start
processes and set variables, so worker 0 has to keep the store.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fastps.errors import UsageError

Names = tuple[str, ...]
MOST = (1 << 20) - 1  # of a rank, a number of workers, a port, and the like
_FIRST_PORT, _PORTS = 20000, 10000  # below the ports that Linux gives to clients
_STEPS = 64  # consecutive jobs of SLURM get ports that are so far apart


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. Of several names, the first that is set counts."""

    name: str  # the launcher, as errors call it
    rank: Names  # this process's number in the job, from 0. The job is this launcher's if it sets this and `workers`.
    workers: Names
    local_rank: Names  # the same on this node
    local_workers: Names = ()
    node: Names = ()  # this node's number; empty where the launcher does not say
    nodes: Names = ()  # how many there are; empty where the launcher does not say
    tasks: Names = ()  # the processes of each node, such as "4(x2),3"; empty where the launcher does not say
    hosts: Names = ()  # the names of the nodes, such as "node[01-03]"; empty where the launcher does not say
    job: Names = ()  # together they name the launch on each of its machines; the first must be set


FASTPS = Launcher(
    "fastps run",
    rank=("FASTPS_RANK",),
    workers=("FASTPS_WORKERS",),
    local_rank=("FASTPS_LOCAL_RANK",),
    local_workers=("FASTPS_LOCAL_WORKERS",),
    node=("FASTPS_NODE_RANK",),
    nodes=("FASTPS_NNODES",),
)
TORCHRUN = Launcher(
    "torchrun",
    rank=("RANK",),
    workers=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_workers=("LOCAL_WORLD_SIZE",),
    node=("GROUP_RANK",),
    nodes=("GROUP_WORLD_SIZE",),
)
SLURM = Launcher(
    "srun",  # its step's own variables: a batch script has those of the whole job, and is one process
    rank=("SLURM_PROCID",),
    workers=("SLURM_STEP_NUM_TASKS",),
    local_rank=("SLURM_LOCALID",),
    node=("SLURM_NODEID",),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    tasks=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    hosts=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
OPEN_MPI = Launcher(
    "Open MPI's mpirun",  # OMPI_COMM_WORLD_NODE_RANK is not the node's number
    rank=("OMPI_COMM_WORLD_RANK",),
    workers=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_workers=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job=("PMIX_NAMESPACE",),
)
HYDRA = Launcher(
    "MPICH's mpiexec",
    rank=("PMI_RANK",),
    workers=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID",),
    local_workers=("MPI_LOCALNRANKS",),
)
POD_INDEX = "JOB_COMPLETION_INDEX"
"""The number of a pod of a Kubernetes job with `completionMode: Indexed`, each of which runs `fastps run`."""
WITHOUT_STORE = (SLURM, OPEN_MPI, HYDRA)
"""Launchers that only start processes, in the order in which fastps looks for them: `srun --mpi=pmi2` sets PMI_RANK, too."""


@dataclass(frozen=True)
class Launched:
    """What a launcher without a store says about this process."""

    launcher: str
    rank: int  # as in Launcher
    workers: int
    local_rank: int
    local_workers: int
    node: int  # this node's number; -1 where the launcher does not say
    nodes: int  # how many there are; 0 where the launcher does not say
    job: str  # the launch's name, the same in all its processes on a machine; "" where the launcher gives none
    rendezvous: str  # the host and port at which worker 0 can keep a store; "" where the launcher does not say


def launched(variables: Mapping[str, str] | None = None) -> Launched | None:
    """How a launcher without a store started this process; None if none did, or if it started only this one.

    `variables` is the environment by default. Raises UsageError for variables that contradict each other.

    >>> found = launched({"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"})
    >>> (found.rank, found.workers, found.nodes)
    (2, 3, 0)
    """
    own = os.environ if variables is None else variables
    for launcher in WITHOUT_STORE:
        if _value(launcher.rank, own) and _value(launcher.workers, own):
            found = _launched(launcher, own)
            if found.workers > 1:  # mpiexec inside a step of one task starts several
                return found if _is_own(found, own) else None
    return None


def _launched(launcher: Launcher, own: Mapping[str, str]) -> Launched:
    rank, workers, local_rank = (number(names, own) for names in (launcher.rank, launcher.workers, launcher.local_rank))
    node = number(launcher.node, own) if launcher.node else -1
    if launcher.tasks:
        tasks = tasks_of_nodes(_value(launcher.tasks, own))
        if sum(tasks) != workers or not node < len(tasks):
            raise UsageError(
                f"{launcher.name}: expected {launcher.tasks[0]} to give the {workers} tasks of each node, found"
                f" {_value(launcher.tasks, own)!r} on node {node}"
            )
        local_workers, nodes = tasks[node], len(tasks)
    else:
        local_workers, nodes = number(launcher.local_workers, own), 1 if number(launcher.local_workers, own) == workers else 0
    parts = [own.get(name, "") for name in launcher.job]
    host = first_host(_value(launcher.hosts, own)) if launcher.hosts else ""
    return Launched(
        launcher.name,
        rank,
        workers,
        local_rank,
        local_workers,
        0 if nodes == 1 else node,
        nodes,
        f"{launcher.name}-{'-'.join(parts)}" if any(parts[:1]) else "",
        f"{host}:{port_of(parts[0], parts[1])}" if host and any(parts[:1]) else "",
    )


def _is_own(found: Launched, own: Mapping[str, str]) -> bool:
    """Whether no other launcher started this process inside the one that was found, or one that only repeats its numbers."""
    if any(name in own for name in (*FASTPS.rank, *FASTPS.workers)):
        return False
    numbers = {"RANK": found.rank, "WORLD_SIZE": found.workers, "LOCAL_RANK": found.local_rank}
    return all(own.get(name, str(value)) == str(value) for name, value in numbers.items())


@dataclass(frozen=True)
class LauncherPlace:
    """The place of a `fastps run` that something else starts on every node; 0, -1 and "" for what that does not say."""

    nodes: int = 0  # how many there are
    node: int = -1  # the number of this one
    rendezvous: str = ""  # HOST:PORT of node 0


def launcher_place(variables: Mapping[str, str] | None = None) -> LauncherPlace:
    """The place of this process as one of several `fastps run`: by SLURM, MPI, or the index of a pod of a Kubernetes job.

    Raises UsageError if there are several on one of several nodes.

    >>> launcher_place({"JOB_COMPLETION_INDEX": "3"})
    LauncherPlace(nodes=0, node=3, rendezvous='')
    """
    own = os.environ if variables is None else variables
    found = launched(own)
    if found is None or found.nodes == 1:
        index = whole(own.get(POD_INDEX, ""))
        return LauncherPlace(node=index) if index is not None else LauncherPlace()
    if found.local_workers > 1 or found.nodes not in (0, found.workers):
        raise UsageError(
            f"{found.launcher} starts {found.workers} processes, {found.local_workers} of them on this node: expected one"
            " `fastps run` for each node, whose -n gives its workers; give srun --ntasks-per-node=1, or mpirun"
            " --map-by ppr:1:node; or start the script itself in place of `fastps run`"
        )
    return LauncherPlace(found.workers, found.node if found.node >= 0 else found.rank, found.rendezvous)


def whole(text: str, most: int = MOST) -> int | None:
    """The whole number from 0 to `most` that a text is; None for any other text.

    >>> whole("12"), whole("1e3"), whole("-1"), whole("9" * 5000)
    (12, None, None, None)
    """
    return int(text) if text.isdecimal() and len(text) <= len(str(most)) and int(text) <= most else None


def number(names: Names, variables: Mapping[str, str] | None = None) -> int:
    """The whole number in the first of these variables that is set. Raises UsageError."""
    text = _value(names, os.environ if variables is None else variables)
    if (found := whole(text)) is None:
        raise UsageError(
            f"the environment says that a launcher started this process as one of several: expected {names[0]} to be a whole"
            f" number, found {text[:40] or None!r}; the largest is {MOST:,}"
        )
    return found


def _value(names: Names, own: Mapping[str, str]) -> str:
    return next((own[name] for name in names if own.get(name)), "")


def tasks_of_nodes(text: str) -> list[int]:
    """The number of tasks of each node, from SLURM's short form. Raises UsageError.

    >>> tasks_of_nodes("4(x2),3")
    [4, 4, 3]
    """
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,5})\))?", part.strip())
        if found is None:
            raise UsageError(f"expected tasks of nodes such as 4(x2),3, as SLURM gives them, found {text!r}")
        tasks += [int(found[1])] * int(found[2] or 1)
    return tasks


def first_host(text: str) -> str:
    """The first host of a list in SLURM's short form; it has the number 0.

    >>> first_host("node[01-03,07],login1"), first_host("a1,b[2-3]"), first_host("rack[1-2]n[4,9]-ib")
    ('node01', 'a1', 'rack1n4-ib')
    """
    head = re.match(r"(?:[^,\[]|\[[^\]]*\])*", text)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", head[0] if head else "")


def port_of(job: str, step: str) -> int:
    """A port for a step of a job of SLURM: steps of jobs that run side by side get different ones.

    >>> port_of("200505", "0"), port_of("200505", "1"), port_of("200506", "0")
    (22320, 22321, 22384)
    """
    numbers = [int("".join(filter(str.isdecimal, text))[-18:] or 0) for text in (job, step)]
    return _FIRST_PORT + (numbers[0] * _STEPS + numbers[1]) % _PORTS
