"""Three nodes train on 5,000 images of MNIST: every discipline learns, and slow nodes and rare exchanges cost little."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from fastps.job.disciplines import DISCIPLINES
from fastps.job.specs import parse_policy
from fastps.lab.demo.data import load
from fastps.lab.demo.models import accuracy, inputs_of, model_for
from tests.support import nodes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

BATCH = 32


def _work(sync: str, steps: int, lr: float, slow: float = 0.0, seconds: float = 0.0) -> Callable[[int], Any]:
    """Train for some steps, or for some seconds; the accuracy and the steps of a worker. Rank 2 waits in each step."""

    def work(rank: int) -> Any:
        data = load("mnist5k")
        torch.manual_seed(0)
        model = model_for(data)
        images, labels = inputs_of(data, data.train_images), torch.tensor(data.train_labels)
        draw = torch.Generator().manual_seed(rank)
        made = 0
        inner = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        with fastps.DistributedOptimizer(inner, sync=sync, batch_size=BATCH, timeout_s=60) as optimizer:
            optimizer.wait_for_start()
            began = time.monotonic()
            while made < steps if steps else time.monotonic() - began < seconds:
                rows = torch.randint(0, len(labels), (BATCH,), generator=draw)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
                loss.backward()
                if slow:
                    time.sleep(slow * (3 if rank == 2 else 1))
                optimizer.report_loss(loss.item(), BATCH)
                optimizer.step()
                made += 1
            optimizer.wait_for_others()
            return accuracy(model, data), made

    return work


# One of each kind that the papers' equations do not tie to bsp: none waits, a count closes a version, and weights are some old.
@pytest.mark.parametrize("name", ["asp", "softsync", "adv*"])
def test_disciplines_learn_over_three_nodes(name: str) -> None:
    policies = [parse_policy(spec) for spec in DISCIPLINES[name].examples]
    policy = next(each for each in policies if not (each.tune or each.ema or each.warm_up) and each.shards <= 20)
    # adv* pulls weights that are some versions old, which needs a smaller rate.
    lr, steps = (0.007, 900) if policy.overlap else (0.02 if policy.is_mean else 0.01, 350)
    outcomes = nodes.train((1, 1, 1), _work(policy.spec, steps, lr), 400)
    print(policy.spec, outcomes)
    # A guess has 0.1, and 0.93 is usual. Which pushes a fold finds is chance, and moves the end by a point or two.
    assert all(found >= 0.9 for found, _ in outcomes), f"{policy.spec}: {outcomes}"
    assert len({found for found, _ in outcomes}) == 1


def test_a_fast_node_does_not_wait_for_a_slow_one_under_dssp() -> None:
    """Node 2 takes three times as long for a step. Under bsp all would make as many as it makes; 1.3 times that must do.

    The sleeps are long beside a step on busy cores.
    """
    steps = [made for _, made in nodes.train((1, 1, 1), _work("dssp:3,15", 0, 0.01, slow=0.2, seconds=8))]
    print(steps)
    assert sum(steps) >= 1.3 * 3 * steps[2]


def test_exchanges_every_32_steps_end_within_a_point_of_bsp() -> None:
    """Two nodes with two workers each, after 8 exchanges at a small rate, where the results of several seeds are close.

    There the paper's algorithm was 1.0 to 1.7 points better than bsp (four seeds), and streaming 0.9 to 1.5 (three seeds). At a
    rate of 0.02 and after 400 steps it was from 1.9 worse to 0.4 better (eight seeds), so rounding decides whether it is within
    a point.
    """
    work = _work("bsp", 256, 0.005)
    streams = {"FASTPS_LOCAL_FRAGMENTS": "4", "FASTPS_LOCAL_OVERLAP": "2", "FASTPS_LOCAL_MIX": "0.5"}
    every, rare, streamed = (
        nodes.train((2, 2), work, 200, FASTPS_LOCAL_STEPS=local_steps, **others)
        for local_steps, others in (("0", {}), ("32", {}), ("32", streams))
    )
    print(every, rare, streamed)
    for outcomes in (every, rare, streamed):
        assert len({found for found, _ in outcomes}) == 1, "all nodes end with the same weights"
        assert outcomes[0][0] >= every[0][0] - 0.01
