"""A3C on CartPole without fastps: processes that share a model and the state of one Adam, as A3C's authors describe it.

python examples/actor_learner/plain.py --workers 2

Each actor copies the shared model, computes gradients with its copy, and lets the shared Adam apply them to the shared model.
Nothing is locked, so updates that meet can be lost, and a copy can mix versions. The evaluator copies the shared model, too.
"""

import argparse
import copy
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.multiprocessing as mp
from task import JUDGE_EVERY, Actor, ActorCritic, judge, network, parser, report

POLL_S = 0.001


@dataclass
class Shared:
    """What all processes see: the model, its optimizer, the number of updates, and whether the training is over."""

    model: ActorCritic
    optimizer: torch.optim.Adam
    updates: Any
    is_over: Any


def shared_adam(model: ActorCritic, lr: float) -> torch.optim.Adam:
    """An Adam whose state lies in shared memory."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for parameter in model.parameters():
        state = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
        optimizer.state[parameter] = {name: value.share_memory_() for name, value in state.items()}
    return optimizer


def act(rank: int, arguments: argparse.Namespace, shared: Shared, barrier: Any) -> None:
    """An actor: learn until the training is over. Ctrl-C is for the process that started it, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = copy.deepcopy(shared.model)
    actor = Actor(rank, arguments, model)
    barrier.wait()
    while not shared.is_over.is_set():
        model.load_state_dict(shared.model.state_dict())
        model.zero_grad()
        actor.learn()
        for parameter, own in zip(shared.model.parameters(), model.parameters(), strict=True):
            parameter.grad = own.grad
        shared.optimizer.step()
        with shared.updates.get_lock():
            shared.updates.value += 1


def evaluate(arguments: argparse.Namespace, shared: Shared, result: Any) -> None:
    """The evaluator: judge copies of the shared model, and send the last mean return and its version."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model = copy.deepcopy(shared.model)

    def versions() -> Iterator[int]:
        version = 0
        while not shared.is_over.is_set():
            if (newest := shared.updates.value) < version + JUDGE_EVERY:
                time.sleep(POLL_S)
                continue
            model.load_state_dict(shared.model.state_dict())
            yield (version := newest)

    result.send(judge(versions(), model, arguments))


def main() -> None:
    """Start the actors and the evaluator, and wait for its answer."""
    options = parser(__doc__)
    options.add_argument("--workers", type=int, default=2)
    arguments = options.parse_args()
    model = network(arguments.seed)
    model.share_memory()
    context = mp.get_context("fork")
    shared = Shared(model, shared_adam(model, arguments.lr), context.Value("q", 0), context.Event())
    barrier = context.Barrier(arguments.workers + 1)
    result, its_end = context.Pipe(duplex=False)
    actors = [
        context.Process(target=act, args=(rank, arguments, shared, barrier), daemon=True) for rank in range(arguments.workers)
    ]
    evaluator = context.Process(target=evaluate, args=(arguments, shared, its_end), daemon=True)
    for process in (*actors, evaluator):
        process.start()
    barrier.wait(60)
    began = time.perf_counter()
    while shared.updates.value < arguments.updates and not result.poll(POLL_S):
        if any(process.exitcode for process in (*actors, evaluator)):
            sys.exit("a process failed")
    seconds = time.perf_counter() - began
    shared.is_over.set()
    mean, version = result.recv()
    for process in (*actors, evaluator):
        process.join()
    report(seconds, mean, version, arguments)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
