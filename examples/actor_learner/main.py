"""A3C on CartPole with fastps: actors that share one Adam and do not wait for each other, and an evaluator that only reads.

python examples/actor_learner/main.py
fastps run -n 2 examples/actor_learner/main.py
torchrun --standalone --nproc-per-node 2 examples/actor_learner/main.py
"""

import argparse
import multiprocessing
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch
from evaluator import evaluate
from task import Actor, network, parser, report

import fastps


def serve(job: str, arguments: argparse.Namespace, result: Connection) -> None:
    """The evaluator's process: send the last mean return and its version. Ctrl-C is for worker 0, whose end ends the job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    result.send(evaluate(job, arguments))


def main() -> None:
    """Play and learn as one of the actors, until the evaluator of worker 0 finds the task solved."""
    options = parser(__doc__)
    options.add_argument("--sync", default="asp", help="any discipline of fastps; asp waits for nobody (asp)")
    arguments = options.parse_args()
    model = network(arguments.seed)
    inner = torch.optim.Adam(model.parameters(), lr=arguments.lr)
    with fastps.DistributedOptimizer(inner, arguments.sync, model=model) as optimizer:
        actor = Actor(fastps.rank(), arguments, model)
        if fastps.rank() == 0:
            lead(optimizer, actor, arguments)
            return
        while optimizer.version < arguments.updates and optimizer.statistics()[0].state == "live":
            learn(optimizer, actor)


def lead(optimizer: fastps.DistributedOptimizer, actor: Actor, arguments: argparse.Namespace) -> None:
    """Worker 0: start the evaluator, learn until it answers, and leave the job, which ends the other actors."""
    context = multiprocessing.get_context("fork")
    result, its_end = context.Pipe(duplex=False)
    evaluator = context.Process(target=serve, args=(optimizer.worker.store.job, arguments, its_end), daemon=True)
    evaluator.start()
    its_end.close()  # so that its death ends the wait for its answer
    optimizer.wait_for_start()
    began = time.perf_counter()
    while optimizer.version < arguments.updates and not result.poll():
        learn(optimizer, actor)
    seconds = time.perf_counter() - began
    optimizer.close()
    mean, version = result.recv()  # the evaluator has an answer, or sees that the job ends
    evaluator.join()
    report(seconds, mean, version, arguments)


def learn(optimizer: fastps.DistributedOptimizer, actor: Actor) -> None:
    """One update: the parameters have the newest weights after it."""
    optimizer.zero_grad()
    actor.learn()
    optimizer.step()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
