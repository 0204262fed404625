"""A user's script in virtual time: what it trains is that of the built-in training, and it repeats on busy and idle cores."""

import json
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastps import parse_policy
from fastps.checkpoint.loading import load
from fastps.lab.demo import data
from fastps.lab.virtual.compute_texts import parse_compute
from fastps.lab.virtual.training import VirtualTraining, _Replay
from fastps.simulation.simulate import Simulation, simulate
from tests.lab.virtual.test_replay import SCRIPT as REPLAYED
from tests.support import commands

BUILT_IN = """
import sys
import fastps, torch
from fastps.lab.demo.data import load
from fastps.lab.demo.models import model_for
from fastps.lab.demo.options import TrainingOptions
from fastps.lab.demo.worker_main import Batches

workers, steps = int(sys.argv[1]), int(sys.argv[2])
data = load("digits")
torch.manual_seed(7)
model = model_for(data)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5))
batches = Batches(data, TrainingOptions(workers=workers, batch_size=16, seed=7), fastps.rank())
for _ in range(steps):
    inputs, labels = batches.next()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    loss.backward()
    optimizer.report_loss(loss.item(), len(labels))
    optimizer.step()
print(f"worker {fastps.rank()} ends at loss {loss.item():.3f}")
"""
DROPS_OUT = """
import fastps, torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = fastps.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01), sync="bsp")
torch.manual_seed(fastps.rank())
while optimizer.version < 60:
    inputs = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.report_loss(loss.item(), 16)
    optimizer.step()
print(f"{optimizer.policy.spec}: {optimizer.version} updates, loss {loss.item()}")
"""
"""With dropout, a discipline of its own, and a number of updates for all workers together."""
UNEVEN = ("--compute", "lognormal:10ms,0.4", "--straggler", "0:3", "--seed", "7")
SAME = ("seconds", "steps", "updates", "dropped", "wait_share", "grant_wait_share", "zero_gap_share")


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        file = tmp_path / "train.py"
        file.write_text(text)
        return str(file)

    return write


def simulated(*arguments: str, workers: int = 4, **variables: str) -> list[dict]:
    """The rows of `fastps simulate --script`."""
    found = commands.done("simulate", "--script", "-n", str(workers), "--json", "-", *arguments, **variables)
    return json.loads(found.stdout)["rows"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spec", ["dssp:3,15", "backup:1"])
def test_the_built_in_task_has_the_weights_of_train(spec: str, written: Callable[[str], str], tmp_path: Path) -> None:
    """Each worker leaves after its own steps; the weights are equal bit by bit."""
    [row] = simulated(*UNEVEN, "--sync", spec, "--checkpoint", str(tmp_path), written(BUILT_IN), "4", "25")
    compute = replace(parse_compute("lognormal:10ms,0.4"), factors={0: 3.0})
    described = Simulation(workers=4, steps=25, leave=True, batch=16, seed=7, compute=compute)
    outcome = simulate(parse_policy(spec), described, trace=True)
    torch.set_num_threads(1)  # as in the workers: it decides the order of sums
    training = VirtualTraining(data=data.load("digits"), learning_rate=0.05, momentum=0.5)
    replay = _Replay(parse_policy(spec), described, training, outcome.trace)
    replay.run(None)
    found = load(tmp_path / spec)
    final = np.concatenate([found.weights()[each["name"]].reshape(-1) for each in found.description["parameters"]])
    np.testing.assert_array_equal(final, replay._shards[0].weights)
    assert row["staleness"] == [list(each) for each in outcome.row["staleness"]]
    assert [row[key] for key in SAME] == [outcome.row[key] for key in SAME]
    assert re.fullmatch(r"worker 0 ends at loss \d\.\d{3}", row["last_line"])
    assert row["loss_over_time"][0][1] > row["loss_over_time"][-1][1] and 0 < row["train_loss"] < 2


DANA = BUILT_IN.replace(
    "lr=0.05, momentum=0.5))",
    """lr=0.02, momentum=0.9 if sys.argv[3] == "worker" else 0.0))
own = [torch.zeros_like(each) for each in model.parameters()]""",
).replace(
    "    optimizer.report_loss",
    """    if sys.argv[3] == "script":
        for each, v in zip(model.parameters(), own):
            v.mul_(0.9).add_(each.grad)
            each.grad.add_(v, alpha=0.9)
    optimizer.report_loss""",
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("spec", ["asp", "ssp:3", "dssp:3,15", "softsync:2"])
def test_the_momentum_of_workers_has_the_bits_of_a_script_that_keeps_it(
    spec: str, written: Callable[[str], str], tmp_path: Path
) -> None:
    """DANA-slim in four lines of a script, and momentum=worker, in four workers of unequal speed."""
    script, found, rows = written(DANA), [], []
    for how, sync in (("script", spec), ("worker", f"{spec},momentum=worker")):
        rows += simulated(*UNEVEN, "--sync", sync, "--checkpoint", str(tmp_path / how), script, "4", "25", how)
        (folder,) = (tmp_path / how).iterdir()
        found.append(load(folder))
    for name, weights in found[0].weights().items():
        np.testing.assert_array_equal(weights, found[1].weights()[name])
    assert {name.split("/")[1] for name in found[1].tensors if name.startswith("momentum/")} == {"0", "1", "2", "3"}
    assert rows[0]["last_line"] == rows[1]["last_line"]
    training = VirtualTraining(data=data.load("digits"), learning_rate=0.02, momentum=0.9)
    compute = replace(parse_compute("lognormal:10ms,0.4"), factors={0: 3.0})
    described = Simulation(workers=4, steps=25, leave=True, batch=16, seed=7, compute=compute)
    policy = parse_policy(f"{spec},momentum=worker")
    replay = _Replay(policy, described, training, simulate(policy, described, trace=True).trace)
    replay.run(None)
    final = np.concatenate([found[1].weights()[each["name"]].reshape(-1) for each in found[1].description["parameters"]])
    np.testing.assert_allclose(final, replay._shards[0].weights, atol=1e-4)


def _burn() -> None:
    while True:
        sum(range(10_000))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("spec", "script", "options", "last"), [
    pytest.param("dssp:3,15", DROPS_OUT, (), "dssp:3,15: ", id="dssp"),
    pytest.param("psp:3,0.75", DROPS_OUT, (), "psp:3,0.75: ", id="psp"),
    pytest.param("asp", REPLAYED, ("15", "table"), "weights ", id="asp with a table"),
])  # fmt: skip
def test_a_run_repeats_bit_by_bit_on_idle_and_on_busy_cores(
    spec: str, script: str, options: tuple[str, ...], last: str, written: Callable[[str], str]
) -> None:
    """test_driver has more disciplines, without a script."""
    arguments = (*UNEVEN, "--sync", spec, written(script), *options)
    [idle] = simulated(*arguments)
    others = [multiprocessing.Process(target=_burn, daemon=True) for _ in range(3)]
    for other in others:
        other.start()
    try:
        [busy] = simulated(*arguments)
    finally:
        for other in others:
            other.kill()
            other.join()
    for row in (idle, busy):
        del row["wall_seconds"], row["events_per_s"]
    assert busy == idle
    assert busy["last_line"].startswith(last)


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("arguments", "message"), [
    (["--script"], "expected a script and its arguments behind the options, found none"),
    (["--script", "nothing.py"], "expected a script's file, found no nothing.py"),
    (["--script", "train.py 40"], "found no train.py 40; its arguments come after it, without quotes"),
    (["--script", "--steps", "3", __file__], "--steps beside --script"),
    (["--script", "--train", __file__], "--train beside --script"),
    (["--script", "-n", "1000000", __file__], r"1000000 workers take \d+.* GiB .* use at most \d+ workers"),
    (["--script", "-n", "125", "--sync", "asp", __file__], "asp expected at most 124 workers"),
    (["--script", "-n", "42", "--sync", "adv*:1", __file__], r"adv\*:1 expected at most 41 workers"),
    (["--script", "--sync", "psp:3,0.75", "--late-push", "0.1:1s", __file__], "expected pushes in order"),
    (["train.py"], "expected --script before a script"),
    (["--checkpoint", "x"], "expected --script before a script"),
])  # fmt: skip
def test_what_cannot_be_simulated_is_refused_before_any_process_starts(arguments: list[str], message: str) -> None:
    said = commands.refused("simulate", *arguments)
    assert re.search(message, said) and "workers are" not in said


TWICE = """
import fastps, torch
for _ in range(2):
    parameters = torch.nn.Linear(2, 1).parameters()
    fastps.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1)).close()
"""
PLAIN = "print('no fastps here')"
OWN_WORKERS = BUILT_IN.replace("momentum=0.5)", "momentum=0.5), server='workers'")
AVERAGES = BUILT_IN.replace("lr=0.05, momentum=0.5))", "lr=0.05), model=model)") + "optimizer.average_buffers()"
FAILS = BUILT_IN.replace(
    "    optimizer.step()", "    optimizer.step()\n    if fastps.rank() == 1: raise ValueError('by design')"
)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("text", "message"), [
    (PLAIN, "expected every worker to wrap its optimizer in fastps.DistributedOptimizer, found one that ended without"),
    (TWICE, "expected a script that wraps one optimizer, once, without job=, found a second wrap"),
    (OWN_WORKERS, "expected no server= in the script, found 'workers'"),
    (AVERAGES, "average_buffers() in virtual time: expected wait_for_others() before it"),
], ids=["no fastps", "wraps twice", "other server", "averages"])  # fmt: skip
def test_a_script_that_cannot_be_simulated_ends_with_a_sentence(text: str, message: str, written: Callable[[str], str]) -> None:
    found = commands.fastps("simulate", "--script", "-n", "3", "--sync", "asp", written(text), "3", "5")
    assert found.returncode != 0
    assert message in " ".join(found.stderr.split()), found.stderr[-2000:]


def test_a_folder_that_has_checkpoints_is_refused_with_what_the_command_can_do(
    written: Callable[[str], str], tmp_path: Path
) -> None:
    (tmp_path / "asp" / "checkpoint-000001").mkdir(parents=True)
    command = ("simulate", "--script", "-n", "2", "--sync", "asp", "--checkpoint", str(tmp_path), written(BUILT_IN), "2", "3")
    assert "checkpoint-000001: delete it, or give another folder" in commands.refused(*command)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_worker_that_failed_is_named_and_not_one_that_ended_in_consequence(written: Callable[[str], str]) -> None:
    """The launcher may find that all have ended at once. It knows by the error's name which ones the driver ended."""
    found = commands.fastps("simulate", "--script", "-n", "3", "--sync", "asp", written(FAILS), "3", "5")
    assert "worker 1 failed first: exit code 1" in found.stderr, found.stderr[-2000:]
    assert found.stderr.count("WorkerDiedError: the driver of virtual time has ended") == 2, found.stderr[-2000:]


# -- deaths and joins --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("spec", ["bsp", "dssp:3,15", "r2sp:0.8"])
def test_a_worker_that_is_killed_and_replaced_repeats_bit_by_bit(spec: str, written: Callable[[str], str]) -> None:
    """The driver compares each version that a worker is granted with that of the arena."""
    arguments = ("--sync", spec, *UNEVEN, "--kill", "2@55ms,1@200ms", "--join", "2@120ms", written(BUILT_IN), "4", "15")
    first, second = (simulated(*arguments)[0] for _ in range(2))
    assert first["weights"] == second["weights"] and first["staleness"] == second["staleness"]
    assert 45 <= first["steps"] < 60 + 15, "two complete workers, a replaced one, and one that was killed late"


JOINER = """
import os, fastps, torch
if sys.argv[1] == "joiner" and os.environ.get("FASTPS_JOINS") or sys.argv[1] == "start" and fastps.rank() == 1:
    raise RuntimeError("no data")
model = torch.nn.Linear(8, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02), model=model)
for step in range(24):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.timeout(60)  # FASTPS_TIMEOUT is 300 s
@pytest.mark.parametrize("who", ["joiner", "start"])
def test_a_worker_that_fails_before_it_comes_ends_the_simulation_at_once_by_name(
    who: str, written: Callable[[str], str]
) -> None:
    changes = ("--kill", "1@20ms", "--join", "1@30ms")
    found = commands.fastps("simulate", "--script", "-n", "2", "--sync", "asp", *changes, written("import sys" + JOINER), who)
    assert found.returncode == 1 and "worker 1 failed first: exit code 1" in found.stderr, found.stderr[-2000:]
    assert "RuntimeError: no data" in found.stderr


# -- the real moment ---------------------------------------------------------------------------------

READS = """
import os, random, time
import fastps, torch

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), model=model)
if fastps.rank() == 0:
    time.sleep(random.SystemRandom().random() / 5)
    model.load_state_dict({"weight": torch.full((1, 8), 0.5), "bias": torch.zeros(1)})  # worker 0 alone
generator = torch.Generator().manual_seed(fastps.rank())
for step in range(12):
    time.sleep(random.SystemRandom().random() / 50)
    inputs = torch.randn(16, 8, generator=generator)
    optimizer.zero_grad()
    (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    READ
"""
READINGS = {
    "averaged_weights()": "with optimizer.averaged_weights(): pass",
    "optimizer.state": "optimizer.state[model.weight]",
    "replace_weights()": "optimizer.replace_weights(lambda weights: weights)",
    "load_state_dict()": "optimizer.load_state_dict(optimizer.state_dict())",
}


@pytest.mark.slow
@pytest.mark.sampled(4)
@pytest.mark.parametrize("what", READINGS)
def test_what_would_depend_on_the_real_moment_is_refused_by_name(what: str, written: Callable[[str], str]) -> None:
    script = written(READS.replace("READ", READINGS[what]))
    found = commands.fastps("simulate", "--script", "-n", "2", "--sync", "asp,ema=0.9", script)
    assert found.returncode != 0
    named = "optimizer.state" if what == "load_state_dict()" else what  # a state dict is read first
    sentence = f"{named} in virtual time: expected wait_for_others() before it"
    assert sentence in " ".join(found.stderr.split()), found.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sync", ["asp", "dssp:1,3", "bsp,ema=0.9"])
def test_weights_that_worker_0_loads_after_wrapping_are_those_of_all_at_any_speed(
    sync: str, written: Callable[[str], str]
) -> None:
    reads = "\n    ".join(READINGS.values()) if sync.startswith("bsp") else "optimizer.take_newest()"
    script = written(READS.replace("READ", reads))
    found = [simulated("--sync", sync, *UNEVEN, script, workers=3)[0]["weights"] for _ in range(4)]
    assert found == found[:1] * 4
