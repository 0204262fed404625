"""Launchers at one rendezvous: node 0 notices those that fall silent, all agree on the job's end, and all hear of its loss."""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import Store, TCPStore

from fastps.network.place import End, Meeting
from fastps.network.presence import Presence, beats_key, forget, holder_key, of_launch, report, reported
from fastps.network.tcp_store import connect_store
from tests.network.conftest import both
from tests.support import nodes
from tests.support.processes import wait_until

GOOD, LOST = End(0), End(75, "its agent was killed")


class Launchers:
    """The presence of each node's launcher, and what it was told of losses."""

    def __init__(self, port: int, count: int, **changes: Any) -> None:
        given = Meeting("127.0.0.1", port, count, 1, 0, 10.0, silence_s=1.5)
        self.store = of_launch(connect_store("127.0.0.1", port, 10.0))
        self.losses: list[str] = []
        self.nodes = [
            Presence(replace(given, number=node, **changes), node, f"token {node}", self.losses.append) for node in range(count)
        ]
        for node in range(count):
            self.store.set(holder_key(node), f"token {node}")

    def start(self) -> None:
        for each in self.nodes:
            each.start()

    def part(self, *ends: End) -> list[End]:
        """What every node finds of the job when they end so."""
        return both(lambda node: self.nodes[node].part(ends[node]), len(self.nodes))


Make = Callable[..., Launchers]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Launchers] = []

    def of(port: int, count: int = 2, **changes: Any) -> Launchers:
        made.append(Launchers(port, count, **changes))
        made[-1].start()
        return made[-1]

    with nodes.rendezvous() as port:
        yield lambda count=2, **changes: of(port, count, **changes)
        for launchers in made:
            for each in launchers.nodes:
                each.end()


@pytest.mark.parametrize(("ends", "expected"), [
    pytest.param((GOOD, GOOD, GOOD), (0, ""), id="well"),
    pytest.param((LOST, GOOD, End(75, "node 0 was lost")), (75, "node 0: its agent was killed"), id="lost"),
    pytest.param((LOST, LOST, End(1, "OSError")), (1, "node 2: OSError"), id="failed"),
])  # fmt: skip
def test_all_nodes_hear_the_same_end(make: Make, ends: tuple[End, ...], expected: tuple[int, str]) -> None:
    found = make(3).part(*ends)
    assert {end.code for end in found} == {expected[0]}
    if expected[0] != 75:  # which loss came first is chance
        assert {end.reason for end, own in zip(found, ends, strict=True) if own.code != 1} == {expected[1]}


def test_a_node_that_ends_well_waits_for_one_that_still_runs(make: Make) -> None:
    launchers = make()
    launchers.nodes[0]._own = GOOD
    wait_until(lambda: reported(launchers.store, 0) is not None, 10, "no report")
    time.sleep(0.5)
    assert not launchers.nodes[0]._has_parted.is_set()
    assert [end.code for end in launchers.part(GOOD, GOOD)] == [0, 0]


@pytest.mark.slow
def test_a_launcher_that_falls_silent_is_reported_by_node_0_and_may_come_again(make: Make) -> None:
    launchers = make()
    wait_until(lambda: int(launchers.store.add(beats_key(1), 0)) > 0, 10, "no sign of life")
    launchers.nodes[1]._ends.set()
    wait_until(lambda: reported(launchers.store, 1) is not None, 10, "nothing was reported")
    found = reported(launchers.store, 1)
    assert found is not None and found.code == 75 and "no sign of life for 1.5 s" in found.reason
    launchers.store.add(beats_key(1), 1)  # it was only stopped
    wait_until(lambda: reported(launchers.store, 1) is None, 10, "the report stands")
    wait_until(lambda: reported(launchers.store, 1) is not None, 10, "nothing was reported again")
    assert launchers.nodes[0].part(GOOD).code == 75
    forget(launchers.store, 1)
    assert reported(launchers.store, 1) is None


def test_a_lost_node_of_a_job_that_goes_on_does_not_wait_for_it(make: Make) -> None:
    launchers = make(goes_on=True)
    assert launchers.nodes[1].part(LOST) == LOST
    assert launchers.nodes[0].part(GOOD).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("begins_again", [False, True])
def test_a_launcher_hears_that_the_rendezvous_has_ended_or_is_of_another_job(begins_again: bool) -> None:
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(nodes.rendezvous())
        launchers = Launchers(port, 2)
        other = launchers.nodes[1]
        other.start()
        wait_until(lambda: int(launchers.store.add(beats_key(1), 0)) > 0, 10, "no sign of life")
        stack.close()
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if begins_again else None
        wait_until(lambda: launchers.losses != [], 20, "no loss")
        said = "the rendezvous was started again" if begins_again else f"the rendezvous at 127.0.0.1:{port} has ended"
        assert launchers.losses == [said]
        assert other.part(GOOD) == End(75, f"{said}, before all nodes had ended")
        assert other.part(LOST) == LOST
        other.end()
        del store


@pytest.mark.parametrize("text", ["", "[]", '["a", "b", 1]', "[1, 2, 3]", '[999, "", 1]', "{}", "\x00\xff"])
def test_a_report_that_no_launcher_makes_is_a_failure(make: Make, text: str) -> None:
    store: Store = make().store
    store.set("end/1", text)
    assert reported(store, 1) == End(1, "it left a report that no launcher makes")
    report(store, 1, 75, "x" * 5000)
    found = reported(store, 1)
    assert found is not None and len(found.reason) == 2000


def test_node_0_does_not_wait_for_others_to_read_for_ever(make: Make) -> None:
    """Node 1's process was killed after its report."""
    launchers = make()
    report(launchers.store, 1, 0, "")
    launchers.nodes[1]._ends.set()
    began = time.monotonic()
    assert launchers.nodes[0].part(GOOD).code == 0
    assert time.monotonic() - began < 10
