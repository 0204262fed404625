"""One worker of the side `mpi`, started by mpiexec: `python -m fastps.bench.mpi_member WORKERS PARAMETERS FOLDER ADDRESS`.

Allreduce in place on one flat float32 tensor, and torch's fused optimizer: the best that users of mpi4py write by hand.
Refuses to do anything but obey the orders that come from ADDRESS.
"""

import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch
from mpi4py import MPI

from fastps.bench.crew import serve
from fastps.bench.member import Member
from fastps.bench.peers import Job, Peer, averaging_sgd


class Mpi(Peer):
    """One flat tensor, Allreduce, one fused step on it that makes the mean."""

    def __init__(self, job: Job, rank: int) -> None:
        self.weights = torch.ones(job.size).requires_grad_()
        self.weights.grad = torch.full((job.size,), job.gradient(rank))
        self.gradient = self.weights.grad.numpy()
        self.optimizer = averaging_sgd(self.weights, job.workers)

    def step(self) -> None:
        """The mean stays in the gradient, so that the next step's mean is the same."""
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self.gradient)
        self.optimizer.step()


def main(workers: int, parameters: int, folder: str, address: str) -> None:
    """Connect, say the rank, and obey."""
    rank = MPI.COMM_WORLD.rank
    job = Job("mpi", workers, parameters, folder)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address)
        connection: Connection[Any, Any] = Connection(caller.detach())
    connection.send(rank)
    serve(rank, lambda rank: Member(job, lambda: Mpi(job, rank)), connection)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
