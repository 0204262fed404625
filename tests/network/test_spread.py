"""A job whose nodes share the weights and the optimizer's state: the results of one home, and what it refuses."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.bench.two_nodes.namespaces import missing_reason
from fastps.errors import PolicyError, UsageError
from fastps.job.nodes import Nodes, check_policy
from fastps.job.options import NodePolicy
from fastps.job.specs import parse_policy
from fastps.network.edge import CHUNK_FLOATS
from tests.network.test_agent import MOMENTUM, Optimizers, train, weights_of
from tests.support import nodes
from tests.support.network.bridge import bridge
from tests.support.scripts import program

STEPS, BATCH = 8, 6
ADAM: Optimizers = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731


class Words(torch.nn.Module):
    """An embedding that is larger than a node's share, and a layer that some steps leave out."""

    def __init__(self, rows: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = torch.nn.Embedding(rows, 16)
        self.sometimes = torch.nn.Linear(16, 16)
        self.top = torch.nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        found = self.words(inputs).mean(1)
        return self.top(torch.tanh(self.sometimes(found)) if uses_all else found)


def _batches(workers: int, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    count = workers * BATCH
    return [
        (torch.randint(0, rows, (count, 4), generator=generator), torch.randint(0, 3, (count,), generator=generator))
        for _ in range(STEPS)
    ]


def _alone(make: Optimizers, workers: int, rows: int) -> np.ndarray[Any, Any]:
    """One process of plain torch that trains on the batches of all workers."""
    model = Words(rows, seed=0)
    train(model, make(model.parameters()), _batches(workers, rows))
    return weights_of(model)


def _train(folder: Path, counts: tuple[int, ...], make: Optimizers, rows: int, **variables: str) -> list[np.ndarray[Any, Any]]:
    """The final weights of all workers. Only worker 0 begins with the weights that the job is to begin with."""

    def work(rank: int) -> Any:
        model = Words(rows, seed=rank)
        with fastps.DistributedOptimizer(make(model.parameters()), batch_size=BATCH, timeout_s=30) as optimizer:
            train(model, optimizer, _batches(sum(counts), rows), slice(rank * BATCH, (rank + 1) * BATCH))
            optimizer.wait_for_others()
            assert optimizer.version == STEPS
            np.save(folder / f"{rank}.npy", weights_of(model))
        return "ended"

    nodes.train(counts, work, **{"FASTPS_HOMES": "spread", **variables})
    return [np.load(folder / f"{rank}.npy") for rank in range(sum(counts))]


_SMALL, _PARTS = 500, 8 * CHUNK_FLOATS // 16  # rows; the second has several parts in each of two shares


@pytest.mark.parametrize(("counts", "make", "rows"), [
    pytest.param((1, 2), ADAM, _SMALL, id="1+2, adam"),
    pytest.param((2, 1, 1), MOMENTUM, _PARTS, id="2+1+1, momentum, parts"),
])  # fmt: skip
@pytest.mark.slow
def test_spread_homes_train_as_one_process_does_with_the_batches_of_all(
    tmp_path: Path, counts: tuple[int, ...], make: Optimizers, rows: int
) -> None:
    """The embedding has more floats than a node's share. The nodes begin with the weights of node 0, not with their own."""
    outcomes = _train(tmp_path, counts, make, rows)
    assert 16 * rows > sum(value.numel() for value in Words(rows, 0).parameters()) / len(counts)
    assert np.allclose(outcomes[0], _alone(make, sum(counts), rows), rtol=0, atol=1e-5)
    assert all(np.array_equal(weights, outcomes[0]) for weights in outcomes)


@pytest.mark.slow
def test_rounded_floats_travel_between_spread_homes(tmp_path: Path) -> None:
    outcomes = _train(tmp_path, (1, 1, 1), MOMENTUM, _SMALL, FASTPS_LINK_DTYPE="int8")
    assert all(np.array_equal(weights, outcomes[0]) for weights in outcomes)
    assert 0 < np.abs(outcomes[0] - _alone(MOMENTUM, 3, _SMALL)).max() < 2e-2


def test_what_spread_homes_cannot_do_is_refused_by_name() -> None:
    policy = NodePolicy(homes="spread")
    two = Nodes(2, 0, 0, 1, "127.0.0.1", 1, policy)
    with pytest.raises(UsageError, match="a lost node takes its share"):
        NodePolicy(homes="spread", on_node_loss="continue")
    for spec in ("asp", "dssp:1,3", "bsp,shards=2"):
        with pytest.raises(PolicyError, match="choose bsp or hardsync"):
            check_policy(parse_policy(spec), two)
    check_policy(parse_policy("hardsync:64"), two)


SCRIPT = """
import json, os, statistics, time
import torch
import fastps

torch.set_num_threads(1)
seconds = {}
for homes in ("first", "spread"):
    os.environ["FASTPS_HOMES"] = homes
    weights = torch.nn.Parameter(torch.zeros(5_000_000))
    with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=120) as optimizer:
        optimizer.expose_gradients()
        weights.grad.fill_(1.0)
        optimizer.wait_for_start()
        times = [time.perf_counter()]
        for _ in range(8):
            optimizer.expose_gradients()
            optimizer.step()
            times.append(time.perf_counter())
        optimizer.wait_for_others()
    seconds[homes] = statistics.median(b - a for a, b in zip(times[2:], times[3:]))
print(json.dumps(seconds))
"""


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.timeout(300)  # six processes import torch on shared cores
def test_replicas_are_as_fast_as_spread_homes_where_a_home_would_be_the_limit(tmp_path: Path) -> None:
    """Three nodes at 400 Mbit/s: every link carries 4/3 of a model each way. Node 0's would carry two for a home."""
    if reason := missing_reason():
        pytest.skip(reason)
    script = program(tmp_path, SCRIPT)[1]
    with bridge(3) as made:
        for node in range(3):
            made.slow(node, 400)
        launchers = [made.launch(node, script, stdout=subprocess.PIPE, text=True) for node in range(3)]
        outs = [launcher.communicate(timeout=250)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0, 0], outs
    seconds = json.loads(outs[0][outs[0].index("{") :])
    print(seconds)
    assert seconds["first"] < 1.25 * seconds["spread"], seconds
