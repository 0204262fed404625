"""momentum=worker: each worker's own momentum, live as an oracle in plain Python has it, in torch's bits, saved and renewed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fastps
from fastps.errors import PolicyError, UnsupportedError, UsageError
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.simulation.simulate import TRACE_KINDS
from fastps.system.clock import Clock
from tests.oracles.worker_momentum import DanaSlim, Vector
from tests.support.virtual_runs import played

WIDTH, RATE = 5, 0.02
SPECS = ("asp", "ssp:1", "dssp:1,4", "softsync:2")


class _Clock(Clock):
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.time_ns = 10**9

    def now_ns(self) -> int:
        return self.time_ns


def _gradient(worker: int, weights: Any) -> Vector:
    """Each worker pulls the weights to a place of its own."""
    return [float(weight) - worker - index for index, weight in enumerate(weights)]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 2**32 - 1), st.sampled_from((0.0, 0.5, 0.9)), st.booleans())
def test_live_workers_move_the_weights_as_the_oracle_says(spec: str, seed: int, mu: float, nesterov: bool) -> None:
    """Four workers of one process push, begin and read when a simulation says."""
    outcome = played(spec, workers=4, steps=15, compute=parse_compute("lognormal:10ms,0.6"), seed=seed)
    assert outcome.trace is not None
    oracle, clock, base, folds = DanaSlim([0.0] * WIDTH, 4, RATE, mu), _Clock(), -1, list[int]()
    update = fastps.SGD(RATE, momentum=mu or 0.1, nesterov=nesterov)
    update = fastps.job.update_rules.Update(update.rule, update.hyper._replace(momentum=mu))
    divisor = fastps.parse_policy(spec).divisor or 1
    with fastps.Store.create(
        {"w": np.zeros(WIDTH, np.float32)}, update, sync=f"{spec},momentum=worker", workers=4, clock=clock
    ) as store:
        workers = [store.attach(rank) for rank in range(4)]
        reads = [0] * 4
        for line in outcome.trace:
            clock.time_ns = 10**9 + int(line["time_ns"])
            kind, rank, worker = TRACE_KINDS[line["kind"]], int(line["worker"]), workers[int(line["worker"])]
            if folds and (kind != "fold" or int(line["version"]) + int(line["detail"]) != base):
                oracle.fold(sorted(folds), divisor)
                folds = []
            if kind == "receive":
                worker.gradients["w"][:] = _gradient(rank, worker.weights["w"])
                worker.push(store.hypers)
                oracle.push(rank, reads[rank], _gradient)
            elif kind == "fold":
                base = int(line["version"]) + int(line["detail"])
                folds.append(rank)
            elif kind == "begin" and worker.steps:
                worker.advance()
                worker.pull()
                reads[rank] = worker.version
                assert np.allclose(worker.weights["w"], oracle.weights[reads[rank]], rtol=1e-4, atol=1e-5)
        for worker in workers:
            worker.close()
    assert len(oracle.weights) > 10


def _trained(how: str, *, mu: float = 0.9, nesterov: bool = False, scale: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(37, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    in_script = how == "script"
    sgd = torch.optim.SGD(net.parameters(), 0.05, 0.0 if in_script else mu, weight_decay=1e-3, nesterov=nesterov)
    sync = "asp" if in_script else "asp,momentum=worker"
    own, random = [torch.zeros_like(each) for each in net.parameters()], torch.Generator().manual_seed(3)
    with fastps.DistributedOptimizer(sgd, sync=sync, workers=1, rank=0, job=f"momentum-{how}-{nesterov}") as optimizer:
        for step in range(30):
            inputs, labels = torch.randn(8, 37, generator=random), torch.randint(5, (8,), generator=random)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(inputs), labels).backward()
            if step % 7 == 3:
                net[0].bias.grad = None
            if in_script:
                for each, v in zip(net.parameters(), own, strict=True):
                    if each.grad is not None:
                        v.mul_(mu).add_(each.grad)
                        each.grad.add_(v, alpha=mu)
            optimizer.step()
        return [each.detach().clone() for each in net.parameters()]


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_weights_have_the_bits_of_a_script_that_keeps_the_momentum_itself(nesterov: bool) -> None:
    script, own = _trained("script"), _trained("fastps", nesterov=nesterov)
    assert all(torch.equal(each, other) for each, other in zip(script, own, strict=True))


def test_one_worker_with_its_own_momentum_is_torchs_nesterov() -> None:
    torch.manual_seed(1)
    plain = torch.nn.Parameter(torch.randn(9))
    ours = torch.nn.Parameter(plain.detach().clone())
    other = torch.optim.SGD([plain], 0.05, 0.9, nesterov=True)
    inner = torch.optim.SGD([ours], 0.05, 0.9, nesterov=True)
    with fastps.DistributedOptimizer(inner, sync="asp,momentum=worker", workers=1, rank=0, job="nesterov") as optimizer:
        for _ in range(20):
            for weight, stepper in ((plain, other), (ours, optimizer)):
                stepper.zero_grad()
                (weight - 3).square().sum().backward()
                stepper.step()
        assert torch.equal(plain, ours)


def _push(worker: fastps.Worker, value: float) -> None:
    worker.step({"w": np.full(WIDTH, value, np.float32)})


def test_a_checkpoint_has_each_workers_momentum_and_a_run_goes_on_with_it(tmp_path: Path) -> None:
    def made(resume: Any = None) -> fastps.Store:
        update = fastps.SGD(0.1, momentum=0.9)
        return fastps.Store.create({"w": np.zeros(WIDTH, np.float32)}, update,
                                   sync="asp,momentum=worker", workers=2, resume=resume)  # fmt: skip

    ends = []
    for resumes in (False, True):
        with made() as store:
            workers = [store.attach(rank) for rank in range(2)]
            for step in range(3):
                _push(workers[0], step + 1.0)
                _push(workers[1], -step)
            folder = fastps.save(workers[0], tmp_path / str(resumes))
            found = fastps.load(folder)
            assert {name for name in found.tensors if name.startswith("momentum/")} == {"momentum/0/w", "momentum/1/w"}
            assert found.tensors["momentum/0/w"][0] == np.float32(3 + 0.9 * np.float32(2 + np.float32(0.9)))
            if not resumes:
                _push(workers[1], 1.0)
                _push(workers[0], 1.0)
                workers[0].pull()
                ends.append(workers[0].weights["w"].copy())
            for worker in workers:
                worker.close()
    with made(found) as store:
        workers = [store.attach(rank) for rank in range(2)]
        _push(workers[1], 1.0)
        _push(workers[0], 1.0)
        workers[0].pull()
        assert np.array_equal(workers[0].weights["w"], ends[0])
        for worker in workers:
            worker.close()


def test_a_replacement_begins_without_momentum_and_a_gradient_that_is_not_finite_leaves_it_alone() -> None:
    update = fastps.SGD(0.1, momentum=0.9)
    weights = {"w": np.zeros(WIDTH, np.float32)}
    with fastps.Store.create(
        weights, update, sync="asp,momentum=worker", workers=2, on_worker_loss="continue", max_workers=2
    ) as store:
        first, second = store.attach(0), store.attach(1)
        _push(second, 2.0)
        assert store.momentum(1)[:WIDTH].tolist() == [2.0] * WIDTH
        _push(second, np.inf)
        assert store.momentum(1)[:WIDTH].tolist() == [2.0] * WIDTH
        second.close()
        third = store.attach()
        assert third.rank == 1 and not store.momentum(1).any()
        third.close()
        first.close()


def test_what_it_does_not_go_with_is_refused() -> None:
    for spec in ("bsp", "backup:1", "r2sp", "hardsync:8", "auto"):
        with pytest.raises(PolicyError, match="with momentum=worker"):
            fastps.parse_policy(f"{spec},momentum=worker")
    with pytest.raises(PolicyError, match="momentum=fold or momentum=worker"):
        fastps.parse_policy("asp,momentum=server")
    weights = {"w": np.zeros(WIDTH, np.float32)}
    for update in (fastps.SGD(0.1), fastps.Adam()):
        with pytest.raises(UnsupportedError, match="expected SGD with momentum"):
            fastps.Store.create(weights, update, sync="asp,momentum=worker")
    with (
        fastps.Store.create(
            weights, fastps.SGD(0.1, momentum=0.9), sync="asp,momentum=worker", gradient_type="float16"
        ) as store,
        pytest.raises(UnsupportedError, match="expected float32 gradients"),
    ):
        store.attach(0)
    with (
        fastps.Store.create(weights, fastps.SGD(0.1, momentum=0.9, dampening=0.1), sync="asp,momentum=worker") as store,
        store.attach(0) as worker,
        pytest.raises(UsageError, match=r"expected dampening 0, found 0\.1"),
    ):
        _push(worker, 1.0)
