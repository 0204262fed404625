"""One worker of the side `mpi`, started by mpiexec: `python -m fastps.bench.mpi_member WORKERS PARAMETERS FOLDER ADDRESS`.

It uses Allreduce in place on one flat float32 tensor and torch's fused optimizer, the best handwritten form with mpi4py, and
answers the commands that come from ADDRESS.
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
    """One flat tensor, Allreduce, and one fused step on it that divides by the number of workers."""

    def __init__(self, job: Job, rank: int) -> None:
        self.weights = torch.ones(job.size).requires_grad_()
        self.weights.grad = torch.full((job.size,), job.gradient(rank))
        self.gradient = self.weights.grad.numpy()
        self.optimizer = averaging_sgd(self.weights, job.workers)

    def step(self) -> None:
        """Take one step; the mean stays in the gradient, so the next step's mean is the same."""
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, self.gradient)
        self.optimizer.step()


def main(workers: int, parameters: int, folder: str, address: str) -> None:
    """Connect, send the rank, and answer commands."""
    rank = MPI.COMM_WORLD.rank
    job = Job("mpi", workers, parameters, folder)
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(address)
        connection: Connection[Any, Any] = Connection(caller.detach())
    connection.send(rank)
    serve(rank, lambda rank: Member(job, lambda: Mpi(job, rank)), connection)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
