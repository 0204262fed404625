"""Nodes that are lost: killed, stopped or cut off. The others name them in time, or go on without them."""

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


def _train(rank: int, sync: str, seconds: float, folder: Path) -> Any:
    """Train for some seconds: how many steps were made, how long the longest was, when it ended, and by what error.

    Leave a file in the folder after ten steps.
    """
    model = torch.nn.Linear(13, 3)
    began = before = time.monotonic()
    steps, longest, text = 0, 0.0, ""
    try:
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync=sync, timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            began = before = time.monotonic()
            while before - began < seconds:
                optimizer.zero_grad()
                model(torch.ones(2, 13)).sum().backward()
                optimizer.step()
                now = time.monotonic()
                steps, longest, before = steps + 1, max(longest, now - before), now
                if steps == 10:
                    (folder / str(rank)).touch()
                time.sleep(0.005)
    except fastps.Error as error:
        text = f"{type(error).__name__}: {error}"
    return steps, longest, time.monotonic(), text


def _lose(number: signal.Signals, loss: str, sync: str, seconds: float, folder: Path) -> tuple[float, list[Any]]:
    """Send a signal to the agent of node 2 of 3; when that was, and how the workers of nodes 0 and 1 ended."""
    with nodes.rendezvous() as port:
        work = lambda rank: _train(rank, sync, seconds, folder)  # noqa: E731
        children = nodes.start((1, 1, 1), port, work, {"FASTPS_ON_NODE_LOSS": loss})
        nodes.await_files(folder, 3)
        time.sleep(0.5)
        found = nodes.agents()
        sent = time.monotonic()
        os.kill(found[2], number)
        processes.finish(children[:2], 60)
        if number == signal.SIGSTOP:
            os.kill(found[2], signal.SIGKILL)
        processes.finish(children[2:], 60)
    return sent, [child.outcome for child in children[:2]]


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGKILL, 1.0), (signal.SIGSTOP, 4.5)])
def test_others_end_in_time_and_name_the_node(number: signal.Signals, within_s: float, tmp_path: Path) -> None:
    sent, outcomes = _lose(number, "stop", "bsp", 60, tmp_path)
    for _, _, ended, text in outcomes:
        assert "NodeLostError: node 2 was lost" in text
        assert ended - sent < within_s


@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:3"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_others_go_on_without_the_node(number: signal.Signals, sync: str, tmp_path: Path) -> None:
    _, outcomes = _lose(number, "continue", sync, 9, tmp_path)
    for steps, longest, _, text in outcomes:
        assert text == ""
        assert steps > 100
        assert longest < (1.0 if sync == "asp" else 4.5)


@pytest.mark.parametrize("sync", ["asp", "bsp", "ssp:3", "softsync:1"])
def test_a_node_that_was_lost_joins_again(sync: str, tmp_path: Path) -> None:
    """Its agent is stopped for longer than the timeout. Its last push is dropped, and it goes on with the newest weights."""
    variables = {"FASTPS_ON_NODE_LOSS": "continue", "FASTPS_NODE_TIMEOUT": "1"}
    with nodes.rendezvous() as port:
        children = nodes.start((1, 1, 1), port, lambda rank: _train(rank, sync, 9, tmp_path), variables)
        nodes.await_files(tmp_path, 3)
        agent = nodes.agents()[2]
        os.kill(agent, signal.SIGSTOP)
        time.sleep(3)
        os.kill(agent, signal.SIGCONT)
        processes.finish(children, 60)
    for steps, _, _, text in (child.outcome for child in children):
        assert text == ""
        assert steps > 100
    assert children[2].outcome[1] > 2, "it waited for its agent"
