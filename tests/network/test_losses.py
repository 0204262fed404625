"""Nodes that are lost: killed, stopped or cut off. The others name them in time, or go on without them.

A busy machine makes every step late, so these tests compare a wait with the node timeout, and count steps.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from tests.support import nodes, processes

pytestmark = pytest.mark.slow

SHORT_S, LONG_S = 3.0, 10.0  # node timeouts: a node that says nothing for so long is lost
STEPS = 50  # of every worker, after what the test waits for


def _train(rank: int, sync: str, folder: Path) -> Any:
    """Train until STEPS steps are made after the file `end` came: how long the longest took, and the end's time and error.

    The first is how many steps were made between the files `sent` and `end`. Leave a file in the folder after ten steps.
    """
    model = torch.nn.Linear(13, 3)
    steps, between, after, longest, text = 0, 0, 0, 0.0, ""
    try:
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync=sync, timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            before = time.monotonic()
            while after < STEPS:
                optimizer.zero_grad()
                model(torch.ones(2, 13)).sum().backward()
                optimizer.step()
                now = time.monotonic()
                steps, longest, before = steps + 1, max(longest, now - before), now
                if steps == 10:
                    (folder / str(rank)).touch()
                if (folder / "end").exists():
                    after += 1
                elif (folder / "sent").exists():
                    between += 1
                time.sleep(0.005)
    except fastps.Error as error:
        text = f"{type(error).__name__}: {error}"
    return between, longest, time.monotonic(), text


def _await_said(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Wait until an agent has said a text on its standard error."""
    deadline, said = time.monotonic() + 60, ""
    while text not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
        said += capfd.readouterr().err


def _lose(
    number: signal.Signals, loss: str, sync: str, timeout_s: float, folder: Path, capfd: pytest.CaptureFixture[str]
) -> tuple[float, list[Any]]:
    """Send a signal to the agent of node 2 of 3; when that was, and how the workers of nodes 0 and 1 ended."""
    variables = {"FASTPS_ON_NODE_LOSS": loss, "FASTPS_NODE_TIMEOUT": str(timeout_s)}
    with nodes.rendezvous() as port:
        children = nodes.start((1, 1, 1), port, lambda rank: _train(rank, sync, folder), variables)
        nodes.await_files(folder, 3)
        agent = nodes.agents()[2]
        sent = time.monotonic()
        os.kill(agent, number)
        (folder / "sent").touch()
        try:
            _await_said(capfd, "node 2 was lost")
        finally:
            (folder / "end").touch()
            processes.finish(children[:2], 60)
            if number == signal.SIGSTOP:
                os.kill(agent, signal.SIGKILL)
            processes.finish(children[2:], 60)
    return sent, [child.outcome for child in children[:2]]


def test_others_end_in_time_and_name_the_node_that_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sent, outcomes = _lose(signal.SIGSTOP, "stop", "bsp", SHORT_S, tmp_path, capfd)
    for _, _, ended, text in outcomes:
        assert "NodeLostError: node 2 was lost" in text
        assert ended - sent < 10


@pytest.mark.parametrize(("number", "sync"), [
    *((signal.SIGKILL, sync) for sync in ("asp", "bsp")), *((signal.SIGSTOP, sync) for sync in ("asp", "bsp", "ssp:3")),
])  # fmt: skip
def test_others_go_on_without_the_node(
    number: signal.Signals, sync: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody waits for a node that has ended, and under asp nobody waits for one that is stopped."""
    is_awaited = number == signal.SIGSTOP and sync != "asp"
    _, outcomes = _lose(number, "continue", sync, SHORT_S if is_awaited else LONG_S, tmp_path, capfd)
    print(outcomes)
    for between, longest, _, text in outcomes:
        assert text == ""
        assert is_awaited or longest < LONG_S / 2
        assert number == signal.SIGKILL or is_awaited or between > 20, "it waited until the node was lost"


@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:3", "softsync:1"])
def test_a_node_that_was_lost_joins_again(sync: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its agent is stopped until the others have lost it. Its last push is dropped, and it goes on with the newest weights."""
    with nodes.rendezvous() as port:
        work = lambda rank: _train(rank, sync, tmp_path)  # noqa: E731
        children = nodes.start((1, 1, 1), port, work, {"FASTPS_ON_NODE_LOSS": "continue"})
        nodes.await_files(tmp_path, 3)
        agent, began = nodes.agents()[2], time.monotonic()
        os.kill(agent, signal.SIGSTOP)
        try:
            _await_said(capfd, "node 2 was lost")
        finally:
            stopped_s = time.monotonic() - began
            os.kill(agent, signal.SIGCONT)
        try:
            _await_said(capfd, "node 2 was lost and has joined again")
        finally:
            (tmp_path / "end").touch()
            processes.finish(children, 60)
    outcomes = [child.outcome for child in children]
    print(stopped_s, outcomes)
    assert [text for _, _, _, text in outcomes] == ["", "", ""]
    assert outcomes[2][1] > stopped_s / 2, "it waited for its agent"
