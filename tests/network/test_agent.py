"""Jobs of several nodes, all on this machine: they train as one process does, under every discipline, and name who is lost."""

import hashlib
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

import fastps
from fastps.job.disciplines import DISCIPLINES
from fastps.job.specs import parse_policy
from fastps.network.agent import LeafFolds
from fastps.network.edge import Edge
from fastps.network.link import GlooLink, LinkLostError
from fastps.network.rendezvous import Rendezvous
from tests.support import nodes, processes
from tests.support.torch_optimizers import steps_on

STEPS, BATCH = 12, 8
Optimizers = Callable[[Any], torch.optim.Optimizer]
MOMENTUM: Optimizers = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)  # noqa: E731


class Branched(torch.nn.Module):
    """A model with a part that only some batches use."""

    def __init__(self, width: int = 17) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = torch.nn.Linear(13, width)
        self.sometimes = torch.nn.Linear(width, width)
        self.top = torch.nn.Linear(width, 3)

    def forward(self, inputs: torch.Tensor, uses_all: bool) -> torch.Tensor:
        below = torch.tanh(self.trunk(inputs))
        return self.top(torch.tanh(self.sometimes(below)) if uses_all else below)


def _batches(workers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(workers * BATCH, 13, generator=generator), torch.randint(0, 3, (workers * BATCH,), generator=generator))
        for _ in range(STEPS)
    ]


def train(model: torch.nn.Module, optimizer: Any, batches: Any, own: slice = slice(None)) -> None:
    """Train on these rows of every batch; each third step leaves a part of the model out."""
    for step, (inputs, labels) in enumerate(batches):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[own], step % 3 > 0), labels[own]).backward()
        optimizer.step()


def weights_of(model: torch.nn.Module) -> np.ndarray[Any, Any]:
    return torch.cat([value.detach().reshape(-1) for value in model.parameters()]).numpy().copy()


def _alone(make: Optimizers, workers: int, width: int = 17) -> np.ndarray[Any, Any]:
    """One process of plain torch that trains on the batches of all workers."""
    model = Branched(width)
    train(model, make(model.parameters()), _batches(workers))
    return weights_of(model)


def _work(make: Optimizers, workers: int, sync: str = "bsp", width: int = 17) -> Callable[[int], Any]:
    def work(rank: int) -> Any:
        model = Branched(width)
        with fastps.DistributedOptimizer(make(model.parameters()), sync=sync, batch_size=BATCH, timeout_s=30) as optimizer:
            assert (fastps.rank(), fastps.world_size()) == (rank, workers)
            train(model, optimizer, _batches(workers), slice(rank * BATCH, (rank + 1) * BATCH))
            optimizer.wait_for_others()
            return weights_of(model), optimizer.version

    return work


@pytest.mark.parametrize(("counts", "width"), [
    pytest.param((1, 2), 17, id="1+2, an agent as users have it", marks=pytest.mark.slow),
    pytest.param((2, 1, 1), 2100, id="2+1+1, several parts", marks=pytest.mark.slow),
])  # fmt: skip
def test_nodes_train_as_one_process_does_with_the_batches_of_all(counts: tuple[int, ...], width: int) -> None:
    """Parameters without a gradient in some steps, too; nodes with different numbers of workers count as many gradients.

    The nodes share a secret, which changes nothing.
    """
    work, expected = _work(MOMENTUM, sum(counts), width=width), _alone(MOMENTUM, sum(counts), width)

    def found(rank: int) -> Any:
        weights, version = work(rank)
        return float(np.abs(weights - expected).max()), version, hashlib.sha256(weights.tobytes()).hexdigest()

    outcomes = nodes.train(counts, found, forks_agents=width > 17, FASTPS_SECRET="a secret of 22 letters")
    assert all(off < 1e-5 and version == STEPS for off, version, _ in outcomes)
    assert len({digest for *_, digest in outcomes}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "within"),
    [(name, ("bsp", "asp")[number % 2]) for number, name in enumerate(name for name in DISCIPLINES if name != "auto")],
)
def test_every_discipline_trains_over_three_nodes(name: str, within: str) -> None:
    """All nodes end with the same weights, which are finite and not those of the beginning.

    The scheme within a node knows nothing of the one between nodes, so each is beside half of the others.
    """
    policies = [parse_policy(spec) for spec in DISCIPLINES[name].examples]
    spec = next(policy.spec for policy in policies if not (policy.tune or policy.ema or policy.warm_up))
    outcomes = nodes.train((1, 2, 1), _work(MOMENTUM, 4, spec), FASTPS_WITHIN=within)
    first = weights_of(Branched())
    for weights, _ in outcomes:
        assert np.isfinite(weights).all()
        assert not np.array_equal(weights, first)
        assert np.array_equal(weights, outcomes[0][0])


@pytest.mark.slow
@pytest.mark.parametrize(("link_dtype", "off"), [("bfloat16", 2e-3), ("float16", 2e-4), ("int8", 2e-2)])
def test_rounded_floats_train_nearly_as_exact_ones_and_end_exactly_equal(link_dtype: str, off: float) -> None:
    outcomes = nodes.train((1, 2), _work(MOMENTUM, 3), FASTPS_LINK_DTYPE=link_dtype)
    expected = _alone(MOMENTUM, 3)
    for weights, _ in outcomes:
        assert np.array_equal(weights, outcomes[0][0])
        assert np.abs(weights - expected).max() < off
    assert not np.array_equal(outcomes[0][0], expected)


def _until_lost(then: Callable[[], Any]) -> Any:
    """Train for as long as nobody is lost; the time and the text of the end. Do something after ten steps."""
    model = Branched()
    whole = partial(model, uses_all=True)
    try:
        with fastps.DistributedOptimizer(MOMENTUM(model.parameters()), timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            steps_on(whole, optimizer, torch.ones(2, 13), 10)
            then()
            steps_on(whole, optimizer, torch.ones(2, 13), 100_000)
    except fastps.Error as error:
        return time.monotonic(), type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_node_is_named_everywhere_at_once(victim: int, tmp_path: Path) -> None:
    with nodes.rendezvous() as port:
        variables = {"FASTPS_NODE_TIMEOUT": "10"}
        children = nodes.start((1, 1), port, lambda rank: _until_lost((tmp_path / str(rank)).touch), variables)
        nodes.await_files(tmp_path, 2)
        agents = nodes.agents()
        sockets = [each for process_id in agents.values() for each in psutil.Process(process_id).net_connections("inet")]
        killed = time.monotonic()
        os.kill(agents[victim], signal.SIGKILL)
        processes.finish(children, 30)
    listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}, "the interface that leads to the rendezvous, and no other"
    for rank, child in enumerate(children):
        ended, kind, text = child.outcome
        assert kind == "NodeLostError"
        assert ended - killed < 4, "not after the node timeout, of 10 s, nor once the edge could not be opened again"
        if rank != victim:
            assert f"node {victim}" in text


@pytest.mark.slow
def test_an_edge_that_is_lost_while_it_first_opens_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The home finds the new connection closed, as was seen once on busy cores. The agents are forked from here."""
    opened = GlooLink.__init__

    def open_and_lose(self: GlooLink, store: Store, name: str, side: int, address: str, timeout_s: float) -> None:
        opened(self, store, name, side, address, timeout_s)
        if side == 0 and name == "edge/1/1/data":
            self.close()
            raise LinkLostError(f"link {name}: planted")

    monkeypatch.setattr(GlooLink, "__init__", open_and_lose)

    def work(_rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4))
        with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=10) as optimizer:
            steps_on(lambda value: value, optimizer, weights, 3)
            optimizer.wait_for_others()
            return weights.tolist()

    assert nodes.train((1, 1), work) == [[-3.0] * 4] * 2


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_node_that_dies_while_its_first_edge_opens_is_lost_at_once(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Rendezvous.open

    def open_and_die(self: Rendezvous, store: Store, node: int, epoch: int, side: int, timeout_s: float) -> Edge:
        edge = opened(self, store, node, epoch, side, timeout_s)
        if side == 1:
            os._exit(9)
        return edge

    monkeypatch.setattr(Rendezvous, "open", open_and_die)

    def work(_rank: int) -> Any:
        began = time.monotonic()
        weights = torch.nn.Parameter(torch.zeros(4))
        try:
            with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=60) as optimizer:
                steps_on(lambda value: value, optimizer, weights, 3)
        except fastps.Error as error:
            return time.monotonic() - began, str(error)
        return time.monotonic() - began, ""

    with nodes.rendezvous() as port:
        children = nodes.start((1, 1), port, work, {"FASTPS_ON_NODE_LOSS": policy})
        processes.finish(children, 100)
    took_s, text = children[0].outcome
    assert took_s < 30, "the job's timeout is 60 s"
    assert text.startswith("node 1 was lost: ") if policy == "stop" else not text
    assert "did not come" not in text, "it came, and the first loss says why it is gone"


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_its_node_and_is_named_on_the_others() -> None:
    def work(rank: int) -> Any:
        return _until_lost(lambda: rank == 2 and os.kill(os.getpid(), signal.SIGKILL))

    with nodes.rendezvous() as port:
        children = nodes.start((1, 2), port, work)
        processes.finish(children, 60)
    assert children[2].exit_code == -signal.SIGKILL
    _, kind, text = children[0].outcome  # the node's other worker may be the first to say so
    assert kind == "NodeLostError"
    assert text.startswith("node 1: worker ")
    assert "worker 1" in text
    assert children[1].outcome[1] in ("WorkerDiedError", "NodeLostError")


@pytest.mark.slow
def test_a_node_with_another_model_is_told_what_differs() -> None:
    def work(rank: int) -> Any:
        model = torch.nn.Linear(13, 3 + rank)
        with fastps.DistributedOptimizer(MOMENTUM(model.parameters()), model=model, timeout_s=20):
            time.sleep(1)

    with nodes.rendezvous() as port:
        children = nodes.start((1, 1), port, work)
        processes.finish(children, 60)
    kind, text = children[1].outcome
    assert kind == "AttachError"
    assert "LayoutError" in text
    assert "parameter 0" in text


@pytest.mark.slow
@pytest.mark.parametrize("shorter", [0, 1])
def test_a_node_with_more_steps_does_not_wait_for_one_that_has_left(shorter: int) -> None:
    """The model has several parts, and the node with fewer steps leaves all of them at once."""

    def work(rank: int) -> Any:
        weights = torch.nn.Parameter(torch.zeros(4_500_000))
        with fastps.DistributedOptimizer(torch.optim.SGD([weights], lr=1.0), timeout_s=10) as optimizer:
            steps_on(lambda value: value, optimizer, weights, 4 if rank == shorter else 7)
            optimizer.wait_for_others()
            return set(weights.tolist()[:: 1 << 18])

    assert nodes.train((1, 1), work) == [{-7.0}, {-7.0}]


@pytest.mark.slow
def test_a_reader_shows_its_own_node_skipped_steps_hold_up_nobody_and_what_needs_the_jobs_state_is_refused() -> None:
    """A node whose workers all make null pushes, as a gradient scaler does, is waited for by nobody. Node 0 has the state.

    What is refused is refused on every worker, not only on the one whose state would count.
    """

    def work(rank: int) -> Any:
        model, other = torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(4, 1, bias=False)
        with fastps.DistributedOptimizer(MOMENTUM(model.parameters()), "asp", model=model, timeout_s=20) as optimizer:
            job = optimizer.worker.store.job
            with fastps.reader(job) as reader:
                for step in range(6):
                    optimizer.zero_grad()
                    model(torch.ones(1, 4)).sum().backward()
                    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(float(rank == 2 and step % 2))
                    optimizer.step()
                found = job.rpartition(".")[2], reader.update(other), torch.equal(other.weight, model.weight)
            for call in (
                optimizer.state_dict,
                lambda: optimizer.replace_weights([torch.ones(1, 4)]),
                lambda: optimizer.load_state_dict(MOMENTUM(other.parameters()).state_dict()),
            ):
                with pytest.raises(fastps.UnsupportedError, match="not in a job of several nodes yet"):
                    call()
            with torch.no_grad():
                model.weight.fill_(1.0)
            model(torch.ones(1, 4)).sum().backward()
            with pytest.raises(fastps.ParameterChangedError, match="load weights before wrapping"):
                optimizer.step()
            return found

    assert nodes.train((2, 1), work) == [("node0", 6, True), ("node0", 6, True), ("node1", 6, True)]


@pytest.mark.parametrize(("variables", "last"), [
    pytest.param({"FASTPS_SYNC": "asp", "FASTPS_WITHIN": "asp", "FASTPS_ON_NODE_LOSS": "continue"}, -12.0, id="asp"),
    pytest.param({"FASTPS_SYNC": "bsp"}, -9.0, id="bsp", marks=pytest.mark.slow),
])  # fmt: skip
def test_an_agent_that_gets_no_core_when_its_workers_leave_folds_what_they_pushed(
    variables: dict[str, str], last: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 makes 3 steps and node 0 makes 9; each gradient of each node is 1, and bsp takes the mean of those that come."""
    look = LeafFolds.is_over

    def look_late(agent: LeafFolds, are_gone: bool) -> bool:
        if agent._leaf.nodes.number == 1:
            time.sleep(0.2)
        return look(agent, are_gone)

    def work(rank: int) -> float:
        weight = torch.nn.Parameter(torch.zeros(1))
        with fastps.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), timeout_s=30) as optimizer:
            for _ in range(3 if rank else 9):
                steps_on(lambda value: value, optimizer, weight, 1)
                time.sleep(0 if rank else 0.05)
            if rank == 0:
                optimizer.wait_for_others()
            return weight.item()

    monkeypatch.setattr(LeafFolds, "is_over", look_late)
    assert nodes.train((1, 1), work, **variables)[0] == last
