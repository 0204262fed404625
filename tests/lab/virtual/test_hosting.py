"""Jobs in virtual time whose optimizer runs in Python: the driver's process runs step(), with the bits of the live process."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps import parse_policy
from fastps.bench.optimizer import Muon
from fastps.kernels.simulation.simulator import KINDS
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.lab.virtual.counterfactual import Counterfactual
from fastps.lab.virtual.driver import Driver, Listener
from fastps.lab.virtual.hosting import Hosting
from fastps.lab.virtual.recorded import recorded_of
from fastps.lab.virtual.replay import Player, Row
from fastps.lab.virtual.script import _Run
from fastps.lab.virtual.training import _updates
from fastps.processes.options import JobOptions
from fastps.simulation.simulate import Simulation, simulate
from fastps.store import jobs_of_process
from fastps.store.worker import Worker
from fastps.system.clock import SYSTEM_CLOCK
from fastps.tracing.file import read
from tests.support import processes
from tests.torch.any_optimizer import test_fold
from tests.torch.any_optimizer.test_fold import Failing, loss_of, new_model, plain, values_of

STEPS, WORKERS, SAMPLES = 8, 3, 5
MAKERS = test_fold.KINDS | {"float32": Muon, "noise": lambda parameters: Noise(parameters), "failing": Failing}
DISCIPLINES = (
    "bsp", "asp", "ssp:2", "dssp:1,4", "softsync:2", "hardsync:15", "backup:1", "r2sp:0.8", "psp:2,1,shards=1",
    "adv*:1,groups=1", "asp,combine=true",
)  # fmt: skip
Values = list[list[float]]


class Noise(torch.optim.Optimizer):
    """Draws numbers."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad + 0.01 * torch.randn_like(p))


def work(kind: str, sync: str, rank: int) -> tuple[Values, Any]:
    """One worker's steps. Returns the last weights, and what the optimizer's state has."""
    torch.set_num_threads(1)
    model = new_model()
    inner = MAKERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(inner, 4)
    optimizer = fastps.DistributedOptimizer(inner, sync, batch_size=SAMPLES)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, 100 * step + rank).backward()
        optimizer.step()
        schedule.step()
    optimizer.wait_for_others()
    state = optimizer.state_dict()["state"]
    optimizer.close()
    assert repr(optimizer.state_dict()["state"]) == repr(state), "after close, too"
    return values_of(model), repr(state)


def hosted(
    sync: str, work: Callable[[int], Any], play: Callable[[Driver], None], workers: int = WORKERS
) -> tuple[list[processes.Child], BaseException | None]:
    """The workers of a job in virtual time, forked, and what ended its driver, which is a thread here."""
    job = f"hosted-{os.getpid()}-{threading.get_native_id()}-{sync}-{SYSTEM_CLOCK.now_ns()}"
    listener, hosting = Listener(job), Hosting([], workers, sync, JobOptions(), play)

    def live(rank: int) -> Any:
        os.environ.update(FASTPS_JOB=job, FASTPS_RANK=str(rank), FASTPS_WORKERS=str(workers))
        os.environ.update(FASTPS_VIRTUAL="1", FASTPS_SERVER="process", FASTPS_SYNC=sync)
        jobs_of_process._next[0] = 0  # as in a new process: the optimizers of earlier tests are not this script's
        return work(rank)

    children = processes.start_each(live, workers)
    driver = threading.Thread(target=hosting.drive, args=(listener,), daemon=True)
    driver.start()
    try:
        processes.finish(children, 150)
    finally:
        listener.close()
        driver.join(60)
        listener.free()
        hosting.free()
    return children, hosting.error


def played(sync: str, work: Callable[[int], Any], play: Callable[[Driver], None]) -> list[Any]:
    """What the workers of such a job return."""
    children, error = hosted(sync, work, play)
    if error is not None:
        raise error
    return processes.results(children, 1)


def replayed(
    sync: str, kind: str, file: Path, before: Callable[[int], object] = lambda rank: None
) -> tuple[list[Any], list[Any], Row]:
    """What the workers of a live job return, which call `before` first, then those of its replay; and the replay's row."""

    def recorded(rank: int) -> Any:
        os.environ["FASTPS_TRACE"] = str(file)
        before(rank)
        return work(kind, sync, rank)

    live = processes.results(processes.start_job(recorded, WORKERS), 150)
    player = Player(Counterfactual(recorded_of(read(file), file)))
    return live, played(sync, lambda rank: work(kind, sync, rank), player.play), player.row


@pytest.mark.parametrize(("sync", "kind"), [
    *(pytest.param(sync, "float32", marks=pytest.mark.sampled(6)) for sync in DISCIPLINES),
    ("bsp", "own"),
    pytest.param("asp", "noise", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_replay_has_the_weights_and_the_state_of_the_recorded_run(sync: str, kind: str, tmp_path: Path) -> None:
    live, again, row = replayed(sync, kind, tmp_path / "run.trace")
    assert again == live and len({repr(each) for each in live}) == 1
    assert row["pushes"] == row["gradients"] == STEPS * WORKERS and row["checksums"] >= 2


@pytest.mark.slow
def test_a_run_in_which_worker_0_began_after_others_had_pushed_is_played_again(tmp_path: Path) -> None:
    """Others wait to hear whether it writes weights before its first step, which here comes after theirs."""
    attach = Worker.__init__

    def late(worker: Worker, *given: Any, **options: Any) -> None:
        time.sleep(1)
        attach(worker, *given, **options)

    def begin_late(rank: int) -> None:
        if rank == 0:
            Worker.__init__ = late  # type: ignore[method-assign]

    live, again, row = replayed("asp", "float32", tmp_path / "run.trace", begin_late)
    assert again == live and row["pushes"] == STEPS * WORKERS


# -- the simulator's events ----------------------------------------------------------------------------


def simulation_of(**options: Any) -> Simulation:
    return Simulation(
        workers=WORKERS, steps=STEPS, batch=SAMPLES, compute=parse_compute("lognormal:10ms,0.4"), seed=5, **options
    )


def loop(sync: str) -> Values:
    """The last weights of plain torch along a simulation's events."""
    policy, model = parse_policy(sync), new_model()
    parameters = list(model.parameters())
    optimizer = Muon(parameters)
    kept, begun = [[each.detach().clone() for each in parameters]], [0] * WORKERS
    reads = [kept[0]] * WORKERS
    made, received = ([deque[Any]() for _ in range(WORKERS)] for _ in range(2))

    def step(gradients: list[list[torch.Tensor]], scale: float, rate: float) -> None:
        for number, parameter in enumerate(parameters):
            parameter.data = kept[-1][number].clone()
            total = sum((each[number] for each in gradients[1:]), gradients[0][number])
            parameter.grad = total * scale if scale != 1 else total
        optimizer.param_groups[0]["lr"] *= rate
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.02
        kept.append([each.detach().clone() for each in parameters])

    def fold(update: list[dict[str, int]]) -> None:
        pushed = [received[each["worker"]].popleft() for each in (sorted(update, key=lambda each: each["worker"]))]
        rates = {
            "linear": len(pushed),
            "square-root": sqrt(len(pushed) * SAMPLES / policy.reference) if policy.reference else 1,
        }
        rate = {**rates, "divisor": 1 / (policy.divisor or 1)}.get(policy.scale, 1.0)
        step(pushed, 1 / len(pushed) if policy.is_mean else 1.0, rate)

    for update, line in _updates(simulate(policy, simulation_of(leave=True), trace=True).trace):
        worker, kind = line["worker"], KINDS[line["kind"]]
        if update:
            fold(update)
        elif kind == "pull":
            reads[worker] = kept[line["version"]]
        elif kind == "begin":
            for parameter, value in zip(parameters, kept[line["version"]] if policy.overlap else reads[worker], strict=True):
                parameter.data = value.clone()
            made[worker].append(torch.autograd.grad(loss_of(model, 100 * begun[worker] + worker), parameters))
            begun[worker] += 1
        elif kind == "receive":
            received[worker].append(made[worker].popleft())
        elif kind == "drop":
            received[worker].pop()
    return [each.flatten().tolist() for each in kept[-1]]


def simulated(sync: str, work: Callable[[int], Any]) -> list[Any]:
    return played(sync, work, _Run(parse_policy(sync), simulation_of(), SYSTEM_CLOCK).play)


def steps_of(kind: str, sync: str, rank: int) -> Values:
    torch.set_num_threads(1)
    model = new_model()
    with fastps.DistributedOptimizer(MAKERS[kind](model.parameters()), sync, batch_size=SAMPLES) as optimizer:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, 100 * step + rank).backward()
            optimizer.step()
        optimizer.wait_for_others()
    return values_of(model)


@pytest.mark.parametrize("sync", [pytest.param(sync, marks=pytest.mark.sampled(3)) for sync in DISCIPLINES])
def test_weights_are_those_of_plain_torch_along_the_same_events(sync: str) -> None:
    torch.set_num_threads(1)
    assert simulated(sync, lambda rank: steps_of("float32", sync, rank)) == [loop(sync)] * WORKERS


def test_virtual_workers_have_the_weights_of_one_process_that_sums_in_their_order() -> None:
    torch.set_num_threads(1)
    found = simulated("bsp", lambda rank: steps_of("own", "bsp", rank))
    assert found == [values_of(plain("own", WORKERS, STEPS)[0])] * WORKERS


def test_an_error_of_the_optimizers_step_is_the_drivers() -> None:
    Failing.end = "raise"
    with pytest.raises(ArithmeticError, match="the user's step fails"):
        simulated("asp", lambda rank: steps_of("failing", "asp", rank))


# -- refusals ------------------------------------------------------------------------------------------


def change(what: str, sync: str) -> None:
    model = new_model()
    with fastps.DistributedOptimizer(Muon(model.parameters()), sync) as optimizer:  # a fork ends without closing it
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if what == "option":
                optimizer.param_groups[0]["momentum"] = 0.9 + step / 100
            optimizer.step((lambda: loss_of(model, 0)) if what == "closure" else None)
            if what == "state":
                optimizer.state_dict()


@pytest.mark.parametrize(("what", "workers", "found"), [
    ("option", WORKERS, "another momentum in param_groups in virtual time: expected"),
    ("state", WORKERS, "optimizer.state in virtual time: expected"),
    ("closure", 1, "Muon in virtual time: a single worker's optimizer calls the closure"),
])  # fmt: skip
def test_what_virtual_time_cannot_do_is_refused_by_name(what: str, workers: int, found: str) -> None:
    """Where all workers make the same steps, options and state are those of a step."""

    def run(sync: str) -> _Run:
        return _Run(parse_policy(sync), replace(simulation_of(), workers=workers), SYSTEM_CLOCK)

    children, _ = hosted("asp", lambda _: change(what, "asp"), run("asp").play, workers)
    assert any(each.outcome[1].startswith(found) for each in children if each.outcome)
    if workers > 1:
        children, error = hosted("bsp", lambda _: change(what, "bsp"), run("bsp").play, workers)
        assert error is None and [each.exit_code for each in children] == [0] * workers
