"""Hogwild as in torch's example: processes that write into one model in shared memory, without fastps.

python examples/hogwild_mnist/plain.py --workers 2
"""

import argparse
import signal
import sys
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from task import Images, images, network, parser, report, train
from torch import nn


def work(rank: int, arguments: argparse.Namespace, model: nn.Module, data: Images, barrier: Any) -> None:
    """One process: train the shared model. Ctrl-C is for the process that started it, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=arguments.momentum)
    barrier.wait()  # so that the measured time has no imports
    train(rank, arguments, model, optimizer, data)


def main() -> None:
    """Start the processes, wait for them, and test the model."""
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=2)
    arguments = options.parse_args()
    to_train, to_test = images(arguments)
    model = network(arguments.seed)
    model.share_memory()
    context = mp.get_context("fork")
    barrier = context.Barrier(arguments.workers + 1)
    workers = [
        context.Process(target=work, args=(rank, arguments, model, to_train, barrier), daemon=True)
        for rank in range(arguments.workers)
    ]
    for worker in workers:
        worker.start()
    barrier.wait(60)
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("a worker failed")
    report(model, to_test, time.perf_counter() - began, arguments.json)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
