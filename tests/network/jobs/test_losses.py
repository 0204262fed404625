"""Nodes that are lost: killed, stopped or cut off. The others name them in time, or go on without them.

A busy machine makes every step late, so these tests compare a wait with the node timeout, and count steps.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from tests.support import nodes, processes
from tests.support.torch_optimizers import steps_on

pytestmark = pytest.mark.slow

SHORT_S, LONG_S = 3.0, 10.0  # node timeouts, of which the first is the default: a node that says nothing for so long is lost
STEPS = 50  # of every worker, after what the test waits for


def _train(rank: int, sync: str, folder: Path) -> Any:
    """Train until STEPS steps are made after the file `end` came: how long the longest took, and the end's time and error.

    The first is how many steps were made between the files `sent` and `lost`. Leave a file in the folder after ten steps.
    """
    model = torch.nn.Linear(13, 3)
    steps, between, after, longest, text, weights = 0, 0, 0, 0.0, "", b""
    try:
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), sync=sync, timeout_s=30) as optimizer:
            optimizer.wait_for_start()
            before = time.monotonic()
            while after < STEPS:
                steps_on(model, optimizer, torch.ones(2, 13))
                now = time.monotonic()
                steps, longest, before = steps + 1, max(longest, now - before), now
                if steps == 10:
                    (folder / str(rank)).touch()
                after += (folder / "end").exists()
                between += (folder / "sent").exists() and not (folder / "lost").exists()
                time.sleep(0.005)
            if sync == "bsp":
                optimizer.wait_for_others()
            weights = model.weight.detach().numpy().tobytes()
    except fastps.Error as error:
        text = f"{type(error).__name__}: {error}"
    return between, longest, time.monotonic(), text, weights


def _await_said(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Wait until an agent has said a text on its standard error."""
    deadline, said = time.monotonic() + 60, ""
    while text not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
        said += capfd.readouterr().err


@contextmanager
def _lost(
    number: signal.Signals, sync: str, folder: Path, capfd: pytest.CaptureFixture[str], **variables: str
) -> Iterator[tuple[int, list[processes.Child]]]:
    """Send a signal to the agent of node 2 of 3; the agent, and the workers, once it is lost. Then training ends without it."""
    with nodes.rendezvous() as port:
        children = nodes.start((1, 1, 1), port, lambda rank: _train(rank, sync, folder), variables)
        nodes.await_files(folder, 3)
        agent = nodes.agents()[2]
        (folder / "sent").touch()
        os.kill(agent, number)
        try:
            _await_said(capfd, "node 2 was lost")
            (folder / "lost").touch()
            yield agent, children
        finally:
            (folder / "end").touch()
            processes.finish(children[:2], 60)
            if number == signal.SIGSTOP and children[2].exit_code is None:
                os.kill(agent, signal.SIGKILL)
            processes.finish(children, 60)


def test_others_end_in_time_and_name_the_node_that_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with _lost(signal.SIGSTOP, "bsp", tmp_path, capfd, FASTPS_ON_NODE_LOSS="stop") as (_, children):
        said = time.monotonic()
    for child in children[:2]:
        _, _, ended, text, _ = child.outcome
        assert "NodeLostError: node 2 was lost" in text
        assert ended - said < 10


def test_others_go_on_without_a_node_that_was_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Even under bsp nobody waits for the node timeout."""
    variables = {"FASTPS_ON_NODE_LOSS": "continue", "FASTPS_NODE_TIMEOUT": str(LONG_S)}
    with _lost(signal.SIGKILL, "bsp", tmp_path, capfd, **variables) as (_, children):
        pass
    for child in children[:2]:
        _, longest, _, text, _ = child.outcome
        assert text == ""
        assert longest < LONG_S / 2


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:3", "softsync:1"])
def test_a_node_that_was_stopped_and_lost_joins_again(sync: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The others go on, under asp at once. The node's last push is dropped, and it goes on with the newest weights.

    Under bsp each node is a replica: the node that comes takes all of the state, and ends with the others' bits.
    """
    with _lost(signal.SIGSTOP, sync, tmp_path, capfd, FASTPS_ON_NODE_LOSS="continue") as (agent, children):
        os.kill(agent, signal.SIGCONT)
        _await_said(capfd, "node 2 was lost and has joined again")
        (tmp_path / "end").touch()
        outcomes = processes.results(children, 60)
    print(outcomes)
    assert [text for _, _, _, text, _ in outcomes] == ["", "", ""]
    assert outcomes[2][1] > SHORT_S / 2, "it waited for its agent"
    if sync == "bsp":
        assert len({weights for *_, weights in outcomes}) == 1
    if sync == "asp":
        assert min(between for between, *_ in outcomes[:2]) > 20, "they waited until the node was lost"
