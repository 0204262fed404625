"""A hostile node at the agent of node 0, over real links: it is refused in a sentence, and harms neither agents nor results.

FASTPS_FUZZ_SECONDS sets how long the slow test plays over each link (20), FASTPS_FUZZ_SEED repeats what was drawn.
"""

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import fastps
from fastps.job.secret import Secret
from fastps.network.home import store_name
from fastps.network.rows import Table
from fastps.store.store import Store
from tests.fuzz.amount import SECONDS, SEED
from tests.support import nodes, processes
from tests.support.network.hostile_node import HostileNode
from tests.support.network.raw_edge import Job

SECRET = "a secret of the fuzz tests"
FLOATS = 500
LONG_S = SECONDS or 20.0
SETTLE_S = 12.0


def _pattern(rank: int) -> torch.Tensor:
    """The gradient of every step of a node: small whole numbers, so that sums of all steps are exact in any order."""
    return (torch.arange(FLOATS) % 5 - 2 + rank).float()


def _home(optimizer: Any) -> Store:
    """The home on this node: of the weights, or of the rows of replicas."""
    store, placement = optimizer.worker.store, optimizer._placement
    if store.layout.server != "replica":
        found: Store = placement._view(optimizer.worker)._arenas()[0]
        return found
    return Store.connect(store_name(store.job, 0), Table(placement._home).layout, [], timeout_s=30)


def _train(rank: int, folder: Path, sync: str) -> Any:
    """Train until a file appears. Returns the steps, the weights, the longest step, and on node 0 the home's counters."""
    log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 2)  # the agent inherits it
    weights = [torch.nn.Parameter(torch.zeros(FLOATS - 7)), torch.nn.Parameter(torch.zeros(7))]
    gradients = _pattern(rank).split([FLOATS - 7, 7])
    steps, longest = 0, 0.0
    with fastps.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), sync=sync, timeout_s=60) as optimizer:
        while not (folder / "end").exists():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            before = time.monotonic()
            optimizer.step()
            steps, longest = steps + 1, max(longest, time.monotonic() - before)
            if steps == 10:
                (folder / "ready" / str(rank)).touch()
            time.sleep(0.01)
        optimizer.wait_for_others()
        counters: list[Any] = []
        if rank == 0:
            home = _home(optimizer)
            counters = [home.version, *(home.arena.counters(lane) for lane in range(3))]
        return steps, torch.cat(weights).detach().numpy().copy(), longest, counters


def _open_things(process_id: int) -> tuple[int, int]:
    """The descriptors and threads of a process, without connections that a stranger has closed, which Gloo keeps."""
    process, count = psutil.Process(process_id), 0
    live = {each.fd for each in process.net_connections("all") if each.status != psutil.CONN_CLOSE_WAIT}
    for entry in Path(f"/proc/{process_id}/fd").iterdir():
        with contextlib.suppress(OSError):
            count += not str(entry.readlink()).startswith("socket:") or int(entry.name) in live
    return count, process.num_threads()


def _settled(process_id: int, most: tuple[int, int] | None = None) -> tuple[int, int]:
    """The fewest descriptors and threads within some seconds, in which lost edges end; at once if there are at most so many."""
    deadline, found = time.monotonic() + SETTLE_S, (1 << 30, 1 << 30)
    while time.monotonic() < deadline and not (most and all(a <= b for a, b in zip(found, most, strict=True))):
        now = _open_things(process_id)
        found = min(found[0], now[0]), min(found[1], now[1])
        time.sleep(0.2)
    return found


def _fuzz(job: Job, agents: dict[int, int], seconds: float, turns: int, joins: bool, settles: bool) -> Any:
    """Play turns for some time, at least so many. Returns what was played, and the open things of node 0's agent."""
    hostile = HostileNode(job, SEED, list(agents.values()), joins)
    began, number, things = time.monotonic(), 0, []
    while number < turns or time.monotonic() - began < seconds:
        hostile.play(number)
        number += 1
        if settles and number == 50:
            hostile.close()
            things = [_settled(agents[0])]
    hostile.close()
    if settles:
        things.append(_settled(agents[0], things[0]))
    if joins:  # nothing that was played keeps the node's number from use
        edge, _ = hostile.join()
        assert hostile.fetch(edge) is not None
        edge.close()
    return number, hostile.turns, hostile.sentences, things


def _variables(link: str, secret: str, loss: str) -> dict[str, str]:
    """Those of a job of three nodes with a worker each, of which only two are started."""
    found = {"FASTPS_NNODES": "3", "FASTPS_WORKERS": "3", "FASTPS_ON_NODE_LOSS": loss, "FASTPS_LINK": link}
    return {**found, "FASTPS_SECRET": secret} if secret else found


def _play(case: tuple[str, str, str, bool], folder: Path, seconds: float, turns: int, *, settles: bool) -> None:
    """Two honest nodes train while a hostile node plays the third. Under asp nobody waits for it; it joins only there."""
    link, secret, sync, joins = case
    (folder / "ready").mkdir()
    with nodes.rendezvous() as port:
        children = nodes.start((1, 1), port, lambda rank: _train(rank, folder, sync), _variables(link, secret, "continue"))
        try:
            job = Job.found(port, link, Secret(secret.encode()) if secret else None, 2)
            if joins:
                nodes.await_files(folder / "ready", 2)
            agents = nodes.agents()
            hostile = processes.start(lambda: _fuzz(job, agents, seconds, turns, joins, settles))
            processes.finish([hostile], seconds + 120)
            nodes.await_files(folder / "ready", 2)
        finally:
            (folder / "end").touch()
            processes.finish(children, 50)  # less than the time after which a node gives up another that never came
    logs = _logs(folder)
    codes = [child.exit_code for child in (hostile, *children)]
    if codes != [0, 0, 0]:
        failures = [child.outcome for child in (hostile, *children) if child.exit_code]
        pytest.fail(f"exit codes {codes}: {failures}\n{logs}", pytrace=False)
    _check(sync, hostile.outcome, [child.outcome for child in children], logs)


def _logs(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob("log-*")))


def _expected(sync: str, first: int, second: int) -> torch.Tensor:
    """The weights after so many steps of the honest nodes alone; exact, because all terms are small multiples of a half."""
    if sync == "asp":
        return -(first * _pattern(0) + second * _pattern(1))
    both = min(first, second)  # a node may see the end one step earlier
    return -(both * (_pattern(0) + _pattern(1)) / 2 + (first - both) * _pattern(0) + (second - both) * _pattern(1))


def _check(sync: str, played: tuple[Any, ...], ends: list[Any], logs: str) -> None:
    number, turns, sentences, things = played
    (first, weights, longest, counters), (second, others, other_longest, _) = ends
    version, *lanes = counters
    summary = (
        f"{number} turns of seed {SEED}: {dict(turns)}\n{dict(sentences)}\ndescriptors and threads {things}, longest steps"
        f" {longest:.2f} and {other_longest:.2f} s, version {version}\n{lanes}"
    )
    print(summary)
    assert np.array_equal(weights, _expected(sync, first, second).numpy()), f"{summary}\n{logs}"
    assert np.array_equal(weights, others)
    assert all(lane["posted"] == lane["done"] for lane in lanes), summary
    if sync == "asp":
        assert version == sum(lane["folded"] + lane["rejected"] for lane in lanes), summary
    else:
        assert lanes[2]["posted"] == 0, summary
    assert "Traceback" not in logs, logs
    if sync == "asp":
        assert max(longest, other_longest) < 5.0, f"an honest node waited: {summary}"
    if things:
        before, after = things
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2, f"descriptors or threads leak: {summary}"


@pytest.mark.slow
def test_a_hostile_node_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    _play(("gloo", "", "bsp", False), tmp_path, 1.0, 8, settles=False)


@pytest.mark.slow
@pytest.mark.timeout(LONG_S + 300)
@pytest.mark.parametrize("case", [
    pytest.param(("gloo", "", "asp", True), id="gloo"),
    pytest.param(("zmq", SECRET, "asp", True), id="zmq"),
    pytest.param(("gloo", SECRET, "bsp", False), id="gloo with a secret, strangers alone"),
])  # fmt: skip
def test_a_hostile_node_is_refused_for_long_and_leaves_nothing_behind(case: tuple[str, str, str, bool], tmp_path: Path) -> None:
    """60 turns or more, of which each kind of a member's is played 2.5 times in the mean."""
    _play(case, tmp_path, LONG_S, 60, settles=True)


@pytest.mark.slow
@pytest.mark.parametrize(("link", "secret", "turn"), [("gloo", SECRET, "member"), ("zmq", SECRET, "stranger")])
def test_a_job_that_stops_with_a_lost_node_names_it_and_the_reason(link: str, secret: str, turn: str, tmp_path: Path) -> None:
    """The hostile node sends garbage before or after a correct HELLO."""
    (tmp_path / "ready").mkdir()
    with nodes.rendezvous() as port:
        children = nodes.start((1, 1), port, lambda rank: _train(rank, tmp_path, "asp"), _variables(link, secret, "stop"))
        nodes.await_files(tmp_path / "ready", 2)
        hostile = HostileNode(Job.found(port, link, Secret(secret.encode()), 2), 3, [])
        if turn == "stranger":
            hostile.stranger()
        else:
            edge, _ = hostile.join()
            edge.send(bytes(range(256)) * 2)
            assert edge.is_over.wait(10)
            edge.close()
        processes.finish(children, 50)
    for child in children:
        assert child.exit_code == 1, _logs(tmp_path)
        assert re.search("NodeLostError.*node 2 was lost: expected a message of fastps, found other bytes", str(child.outcome))
