"""The environment of a launched worker: its rank and job in fastps' own variables, or in torchrun's as well.

Libraries that see torchrun's variables (Accelerate, Lightning, the Trainer) start a process group and average gradients
themselves, so a script gets these variables only if it asks for them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from fastps.device.placement import gpu_variables
from fastps.errors import UsageError
from fastps.job.environment import TRACE_VARIABLE
from fastps.processes.program import Program

Style = Literal["fastps", "torchrun"]
# Of this process, if it is itself a launched worker: how it began.
_OF_THIS_WORKER = ("FASTPS_JOINS", "FASTPS_VIRTUAL", "FASTPS_PAUSE", "FASTPS_PROCESS")
_OF_NODES = ("FASTPS_NNODES", "FASTPS_NODE_RANK", "FASTPS_RENDEZVOUS", "FASTPS_LOCAL_RANK", "FASTPS_LOCAL_WORKERS")
_ASKS = re.compile(rb"\bRANK\b|\bLOCAL_RANK\b|\bWORLD_SIZE\b|\bMASTER_PORT\b|\binit_process_group\b|\binit_device_mesh\b")


def style_of(wanted: str, command: Sequence[str]) -> Style:
    """Return "fastps" or "torchrun" for a command; "auto" chooses "torchrun" if the script's text names torchrun's variables.

    Modules are searched below the working directory. Raises UsageError for any other word.

    >>> style_of("torchrun", ["python", "train.py"])
    'torchrun'
    """
    if wanted in get_args(Style):
        return wanted  # type: ignore[return-value]
    if wanted != "auto":
        raise UsageError(f"--env: expected fastps, torchrun or auto, found {wanted!r}")
    return "torchrun" if any(_ASKS.search(text) for text in Program(command).texts) else "fastps"


def inherited() -> dict[str, str]:
    """This process's environment without what only concerns its own place in a job; at a terminal `breakpoint()` asks there."""
    found = {name: value for name, value in os.environ.items() if name not in _OF_THIS_WORKER}
    return {"PYTHONBREAKPOINT": "fastps.store.pausing.ask", **found} if _has_keyboard() else found


def _has_keyboard() -> bool:
    """Whether this process's group has the terminal that is its standard input."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # it is none
        return False


def torchrun_variables(
    rank: int, world: int, local_rank: int, local_world: int, node: int, nodes: int, host: str, port: int
) -> dict[str, object]:
    """The variables by which torchrun tells a worker its place, and where worker 0 listens."""
    return {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world,
        "ROLE_RANK": rank, "ROLE_WORLD_SIZE": world, "GROUP_RANK": node, "GROUP_WORLD_SIZE": nodes,
        "MASTER_ADDR": host, "MASTER_PORT": port,
    }  # fmt: skip


_TORCHRUN = ("ROLE_NAME", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID")
_OF_TORCHRUN = (*_TORCHRUN, *torchrun_variables(0, 1, 0, 1, 0, 1, "", 0))


def environment_of(
    rank: int,
    workers: int,
    port: int,
    job: str,
    sync: str | None,
    base: Mapping[str, str],
    *,
    style: Style = "fastps",
    restart: int = 0,
    restarts: int = 0,
    trace: Path | None = None,
) -> dict[str, str]:
    """Return the variables of one worker: rank, job, and its share of threads unless the user set a number.

    The style "fastps" removes torchrun's variables from `base`. `port` is free, for the style "torchrun".
    """
    cores = len(os.sched_getaffinity(0))
    variables = {name: value for name, value in base.items() if name not in (*_OF_TORCHRUN, *_OF_NODES)}
    variables |= {
        "FASTPS_RANK": str(rank),
        "FASTPS_WORKERS": str(workers),
        "FASTPS_JOB": job,
        "FASTPS_RUN": job,
        "PYTHONUNBUFFERED": base.get("PYTHONUNBUFFERED", "1"),
    }
    if style == "torchrun":
        place = torchrun_variables(rank, workers, rank, workers, 0, 1, "127.0.0.1", port)
        variables |= {name: str(value) for name, value in place.items()}
        variables |= dict(zip(_TORCHRUN, ("default", str(restart), str(restarts), job), strict=True))
    variables |= gpu_variables(rank, base, keeps_order=style == "torchrun")
    variables.setdefault("OMP_NUM_THREADS", str(max(1, cores // workers)))
    if sync is not None:
        variables["FASTPS_SYNC"] = sync
    if trace is not None:
        variables[TRACE_VARIABLE] = str(trace)
    return variables
