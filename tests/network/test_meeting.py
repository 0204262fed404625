"""Workers whose launcher keeps no store: they meet, learn their nodes, and train over two of them."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.system.ports import free_port
from tests.support import nodes, processes
from tests.support.scripts import output
from tests.support.torch_optimizers import mean_square, steps_on

Variables = dict[str, str]
SCRIPT = Path(__file__).parents[1] / "support" / "network" / "train_on_nodes.py"


def srun(placement: Sequence[int], rank: int) -> Variables:
    """What srun sets for a rank; `placement` has the node of each rank."""
    count = max(placement) + 1
    return {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(placement[:rank].count(placement[rank])),
        "SLURM_NODEID": str(placement[rank]),
        "SLURM_STEP_NUM_NODES": str(count),
        "SLURM_STEP_NUM_TASKS": str(len(placement)),
        "SLURM_STEP_TASKS_PER_NODE": ",".join(str(placement.count(node)) for node in range(count)),
        "SLURM_STEP_NODELIST": "localhost,elsewhere[1-3]",
        "SLURM_NTASKS": "99",  # the whole job's
        "SLURM_TASKS_PER_NODE": "33(x3)",
        "SLURM_NNODES": "3",
    }


def mpirun(placement: Sequence[int], rank: int) -> Variables:
    """What Open MPI sets for a rank."""
    own = placement[rank]
    return {
        "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(len(placement)),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(placement[:rank].count(own)),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(placement.count(own)),
    }


def _made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _weights(model: torch.nn.Module, optimizer: Any, workers: int, rows: slice = slice(None)) -> np.ndarray[Any, Any]:
    """The weights after six steps with these rows of the batches of all."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(6):
        steps_on(model, optimizer, torch.randn(4 * workers, 5, generator=generator)[rows], loss=mean_square)
    if isinstance(optimizer, fastps.DistributedOptimizer):
        optimizer.wait_for_others()
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()]).numpy().copy()


def _train(rank: int) -> Any:
    """Train on this rank's share of each batch, twice; the number of this node and the weights."""
    found = []
    for _ in range(2):
        model, inner = _made()
        with fastps.DistributedOptimizer(inner, batch_size=4, timeout_s=30) as optimizer:
            workers = fastps.world_size()
            found.append(_weights(model, optimizer, workers, slice(rank, None, workers)))
    return (fastps.rank(), workers), found


def _start(
    launcher: Callable[[Sequence[int], int], Variables], placement: Sequence[int], work: Callable[[int], Any], **variables: str
) -> list[processes.Child]:
    children = []
    for rank in range(len(placement)):
        own = launcher(placement, rank)

        def run(rank: int = rank, own: Variables = own) -> Any:
            for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI"))]:
                del os.environ[name]
            os.environ.update({**own, **variables})
            torch.set_num_threads(1)
            return work(rank)

        children.append(processes.start(run))
    return children


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "placement"), [
    pytest.param(srun, (0, 1, 0), id="srun, dealt out in turn"),
    pytest.param(mpirun, (0, 1, 1), id="mpirun, uneven"),
])  # fmt: skip
def test_scripts_that_a_launcher_only_starts_train_over_two_nodes(launcher: Any, placement: tuple[int, ...]) -> None:
    """Two optimizers after each other; the same result as one process with the batches of all."""
    variables = {"FASTPS_RENDEZVOUS": f"127.0.0.1:{free_port()}"} if launcher is mpirun else {}
    children = _start(launcher, placement, _train, **variables)
    expected = _weights(*_made(), len(placement))
    for rank, (place, weights) in enumerate(processes.results(children, 60)):
        assert place == (rank, len(placement))
        for each in weights:
            assert np.allclose(each, expected, rtol=0, atol=1e-5)


def _refused(rank: int) -> Any:
    with pytest.raises(fastps.Error) as caught:
        fastps.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0), timeout_s=20)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.slow
def test_ranks_that_mpi_deals_out_in_turn_are_refused_on_every_node() -> None:
    """Nothing then says which node a process is on."""
    children = _start(mpirun, (0, 1, 0, 1), _refused, FASTPS_RENDEZVOUS=f"127.0.0.1:{free_port()}")
    processes.finish(children, 60)
    assert all("AttachError: Open MPI's mpirun does not number the nodes" in child.outcome for child in children)


def test_mpi_without_a_place_to_meet_is_refused() -> None:
    children = _start(mpirun, (0, 1), _refused)
    processes.finish(children, 60)
    assert all("set FASTPS_RENDEZVOUS=HOST:PORT for all of them" in child.outcome for child in children)


@pytest.mark.slow
def test_a_port_that_is_in_use_is_named_by_worker_0() -> None:
    with nodes.rendezvous() as port:
        children = _start(mpirun, (0, 1), _refused, FASTPS_RENDEZVOUS=f"127.0.0.1:{port}", FASTPS_TIMEOUT="3")
        processes.finish(children, 60)
    assert f"UsageError: node 0 cannot listen on port {port}" in children[0].outcome
    assert "NodeLostError" in children[1].outcome


def _mpiexec(name: str) -> list[str]:
    found = next(
        (path for path in (Path(sys.executable).parent / name, shutil.which(name)) if path and Path(path).exists()), None
    )
    if found is None:
        pytest.skip(f"{name} is not installed")
    return [str(found)]


@pytest.mark.slow
def test_a_real_mpiexec_starts_two_nodes(tmp_path: Path) -> None:
    """MPICH's, with both nodes on this machine: a script in place of ssh starts its second proxy here."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    command = [*_mpiexec("mpiexec.hydra"), "-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", "127.0.0.1:1,127.0.0.2:2"]
    variables = {
        "FASTPS_RENDEZVOUS": f"127.0.0.1:{free_port()}",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    shown = output([*command, "-n", "3", sys.executable, str(SCRIPT)], env={**os.environ, **variables})
    # The lines of processes that end at once may have lost the ends that part them.
    found = sorted(re.findall(r"([0-9]) of 3 (node[01]:[12])", shown))
    assert found == [("0", "node0:1"), ("1", "node1:2"), ("2", "node1:2")], shown
