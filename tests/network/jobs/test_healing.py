"""Losses of a job of several nodes: the exit codes that tell them from errors, and launchers that meet again with --retries."""

import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.network.launched_nodes import PROGRAM, LaunchedNodes, alone, launched
from tests.support.processes import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # a job of two nodes needs ten seconds of processor time to begin

STEPS, PAUSE_S = 200, 0.02


def _totals(nodes: LaunchedNodes) -> list[float]:
    return [float(text) for node in range(nodes.count) for text in re.findall(r'"total": ([\d.]+)', nodes.said(node))]


ENDS = """
import os, signal, sys
import torch
import fastps

model = torch.nn.Linear(4, 1)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
for _ in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
how, last = sys.argv[1:]
if last == "at the end":
    optimizer.wait_for_others()
    optimizer.close()
if fastps.rank() == 1:
    if how == "raises":
        raise OSError("no space left")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
elif last == "while all train":
    for _ in range(100000):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
"""


@pytest.mark.parametrize("moment", ["while all train", "at the end"])
@pytest.mark.parametrize(("how", "code", "said"), [
    ("raises", 1, "OSError: no space left"), ("is killed", 75, "worker 0 failed first: ended by SIGKILL"),
])  # fmt: skip
def test_every_node_ends_with_the_code_of_the_first_failure(
    how: str, code: int, said: str, moment: str, tmp_path: Path
) -> None:
    """Also those whose own workers have ended well."""
    with launched(tmp_path, 2, ENDS, "--", how, moment) as nodes:
        codes = nodes.wait(90)
    assert codes == [code, code], nodes.texts()
    assert "the job ended because of node 1" in nodes.said(0) and said.split(":")[0] in nodes.said(0).replace("\n", " ")


@pytest.mark.parametrize("kind", ["agent", "launcher"])
def test_without_retries_a_lost_node_ends_the_others_with_the_code_to_try_again(kind: str, tmp_path: Path) -> None:
    with launched(tmp_path, 2, PROGRAM, "--", "100000", "0.01") as nodes:
        nodes.await_steps(10)
        assert nodes.kill(1, kind) == 1
        codes = nodes.wait(90)
    assert codes == [75, 75 if kind == "agent" else -signal.SIGKILL], nodes.texts()


@pytest.mark.parametrize("retries", [0, 3])
def test_the_death_of_the_rendezvous_is_named_at_once(retries: int, tmp_path: Path) -> None:
    """Without retries the job trains on, and its end is in doubt."""
    with launched(tmp_path, 2, PROGRAM, "--retries", str(retries), "--", "150", "0.02") as nodes:
        nodes.await_steps(20)
        assert nodes.kill(0, "rendezvous") == 1
        killed = time.monotonic()
        wait_until(lambda: "was ended by SIGKILL: no node can join the job any more" in nodes.said(0), 10, "nothing was said")
        assert time.monotonic() - killed < 5
        codes = nodes.wait(120)
    assert codes == ([0, 0] if retries else [75, 75]), nodes.texts()
    assert len(_totals(nodes)) == 2, "all workers come to the end"


def test_with_retries_lost_nodes_meet_again_and_end_with_the_weights_of_an_undisturbed_job(tmp_path: Path) -> None:
    saved = str(tmp_path / "saved")
    options = ["--retries", "9", "--checkpoint", saved, "--resume", saved, "--every", "10"]
    with launched(tmp_path, 2, PROGRAM, *options, "--", str(STEPS), str(PAUSE_S)) as nodes:
        for last, (node, kind) in enumerate([(1, "agent"), (0, "launcher"), (1, "worker"), (1, "node")]):
            nodes.await_steps(20 + 30 * last)
            assert nodes.kill(node, kind) > 0
            if kind in ("launcher", "node"):  # as a supervisor does
                nodes.launchers[node].wait(10)
                nodes.start(node)
        codes = nodes.wait(200)
    assert codes == [0, 0], nodes.texts()
    assert "go on from checkpoint-" in nodes.said(1) and "retry 1 of 9" in nodes.said(1)
    assert _totals(nodes) == pytest.approx([alone(2, STEPS)[0]] * 2, rel=1e-3)


def test_a_lost_node_joins_a_job_that_went_on_without_it(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    options = ["--retries", "3", "--on-node-loss", "continue", "--sync", "asp"]
    with launched(tmp_path, 2, PROGRAM, *options, "--", "100", "0.02", variables={"GATE_OF_TESTS": str(gate)}) as nodes:
        nodes.await_steps(10)
        assert nodes.kill(1, "agent") == 1
        wait_until(lambda: nodes.said(1).count("fastps: node 1: 1 worker") == 2, 90, "it did not meet again")
        wait_until(lambda: len(nodes.find(1, "worker")) == 1 and nodes.steps()[1] > 10, 60, "it makes no steps")
        gate.touch()
        codes = nodes.wait(90)
    assert codes == [0, 0], nodes.texts()
    assert nodes.said(0).count("fastps: node 0: 1 worker") == 1, "node 0 went on"
    assert "the job goes on without it" in nodes.said(0)


def test_retries_end_and_ctrl_c_ends_a_pause_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, 2, PROGRAM, "--retries", "1", "--", "100000", "0.01") as nodes:
        nodes.await_steps(10)
        nodes.kill(1, "agent")
        wait_until(lambda: all("retry 1 of 1" in nodes.said(node) for node in range(2)), 60, "no pause")
        nodes.kill(1, "launcher", signal.SIGINT)
        assert nodes.launchers[1].wait(5) == 130
        nodes.kill(0, "launcher", signal.SIGINT)
        assert nodes.wait(30) == [130, 130]


def test_a_node_that_does_not_see_the_checkpoint_of_node_0_is_told_where_to_put_it(tmp_path: Path) -> None:
    own = [str(tmp_path / name) for name in ("a", "b")]
    with launched(tmp_path, 0, PROGRAM, "--retries", "3", "--every", "10", "--", "100000", "0.01") as nodes:
        nodes.count = 2
        for node in range(2):
            nodes.start(node, "--checkpoint", own[node])
        wait_until(lambda: any(Path(own[0]).glob("checkpoint-*")), 90, "no checkpoint")
        nodes.kill(1, "agent")
        codes = nodes.wait(90)
    assert codes == [1, 1], nodes.texts()
    assert "does not see checkpoint-" in nodes.said(1) and "that all nodes share" in nodes.said(1)
