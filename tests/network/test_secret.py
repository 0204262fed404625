"""The proof of a job's secret: equal secrets pass, everything else is refused with a sentence, and no secret is ever shown."""

import os
import queue
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

import fastps
from fastps.job.secret import Secret
from fastps.network.messages import Header, Kind
from fastps.network.secret import EdgeName, are_equal, mac, prove
from tests.network.conftest import Pair, both, reason_of
from tests.support import nodes, processes

FIRST, OTHER = Secret(b"the first secret text"), Secret(b"another secret text!!")
NAME = EdgeName("job", 1, 3, bytes(range(32)))


@dataclass
class Pipe:
    """One end of a pair of queues of headers; `sent` is what this end has sent."""

    into: "queue.Queue[Header]"
    out: "queue.Queue[Header]"
    sent: list[Header] = field(default_factory=list)

    def send_header(self, header: Header) -> None:
        self.sent.append(header)
        self.out.put(Header.unpack(header.pack()))

    def next_header(self, timeout_s: float) -> Header | None:
        try:
            return self.into.get(timeout=timeout_s)
        except queue.Empty:
            return None


def _run(leaf: Callable[[Pipe], None], home: Callable[[Pipe], None]) -> tuple[list[str], tuple[Pipe, Pipe]]:
    """The reason with which each side ends, or an empty text."""
    there: queue.Queue[Header] = queue.Queue()
    back: queue.Queue[Header] = queue.Queue()
    ends = Pipe(back, there), Pipe(there, back)
    return both(lambda side: reason_of(lambda: (leaf, home)[side](ends[side]))), ends


def _side(
    secret: Secret | None, name: EdgeName = NAME, *, is_home: bool = False, timeout_s: float = 30.0
) -> Callable[[Pipe], None]:
    return lambda end: prove(end, secret, name, is_home=is_home, timeout_s=timeout_s)


@pytest.mark.parametrize(("secret", "kinds"), [(FIRST, [Kind.CHALLENGE, Kind.PROOF]), (None, [])], ids=["equal", "none"])
def test_equal_secrets_pass_and_without_one_nothing_is_sent(secret: Secret | None, kinds: list[Kind]) -> None:
    reasons, ends = _run(_side(secret), _side(secret, is_home=True))
    assert reasons == ["", ""]
    assert [[header.kind for header in end.sent] for end in ends] == [kinds] * 2


@pytest.mark.parametrize(("leaf", "message"), [
    pytest.param(_side(OTHER), "different secrets: give all nodes the same", id="another secret"),
    pytest.param(_side(FIRST, replace(NAME, epoch=4)), "different secrets", id="another epoch"),
    pytest.param(_side(FIRST, replace(NAME, job="other")), "different secrets", id="another job"),
    pytest.param(_side(FIRST, replace(NAME, node=2)), "different secrets", id="another node"),
    pytest.param(_side(FIRST, replace(NAME, layout=bytes(32))), "different layouts: build the same", id="another layout"),
    pytest.param(lambda end: end.send_header(Header(Kind.HELLO)), "has a secret, and a node did not", id="no secret"),
    pytest.param(lambda end: end.send_header(Header(Kind.FETCH)), "expected CHALLENGE, found FETCH", id="no proof"),
    pytest.param(lambda end: None, "did not prove within 0.5 s", id="silence"),
    pytest.param(
        lambda end: end.send_header(Header(Kind.CHALLENGE, layout=NAME.layout, text="x" * 99)), "a nonce of 32 bytes",
        id="a nonce that is none",
    ),
])  # fmt: skip
def test_the_home_refuses_everything_else(leaf: Callable[[Pipe], None], message: str) -> None:
    reasons, (_, home) = _run(leaf, _side(FIRST, is_home=True, timeout_s=0.5 if "within" in message else 30.0))
    assert message in reasons[1]
    assert Kind.PROOF not in [header.kind for header in home.sent], "the home proves nothing to a side that did not"
    everything = "".join(header.text for header in home.sent) + reasons[0] + reasons[1]
    assert FIRST.key.decode() not in everything


def test_a_leaf_refuses_a_home_that_repeats_its_proof() -> None:
    """A home without the secret sends back what it was sent."""

    def mirror(end: Pipe) -> None:
        for _ in range(2):
            header = end.next_header(30.0)
            assert header is not None
            end.send_header(header)

    reasons, _ = _run(_side(FIRST), mirror)
    assert "different secrets" in reasons[0]


def test_a_recorded_proof_is_worth_nothing_the_next_time() -> None:
    _, (recorded, _) = _run(_side(FIRST), _side(FIRST, is_home=True))

    def replay(end: Pipe) -> None:
        for header in recorded.sent:
            end.send_header(header)

    reasons, _ = _run(replay, _side(FIRST, is_home=True))
    assert "different secrets" in reasons[1]


def test_codes_compare_with_any_text() -> None:
    code = mac(FIRST, "a")
    assert are_equal(code, mac(FIRST, "a"))
    assert not are_equal("ä", code)
    assert not are_equal(mac(OTHER, "a"), code)


def test_both_sides_of_a_real_edge_hear_why(pair: Pair) -> None:
    def side(number: int) -> None:
        prove(pair.edges[number], (FIRST, OTHER)[number], NAME, is_home=number == 1, timeout_s=5.0)

    assert all("different secrets" in reason for reason in both(lambda number: reason_of(lambda: side(number))))


# -- jobs ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("secrets", "message"), [
    pytest.param(("a secret of 22 letters", "another of 22 letters!"), "different secrets", id="different"),
    pytest.param(("a secret of 22 letters", ""), "did not prove that it knows it", id="only the home"),
    pytest.param(("", "a secret of 22 letters"), "node 0 was given no secret", id="only the leaf"),
])  # fmt: skip
def test_a_job_whose_nodes_have_different_secrets_ends_by_name(secrets: tuple[str, str], message: str) -> None:
    def work(rank: int) -> None:
        if secrets[rank]:
            os.environ["FASTPS_SECRET"] = secrets[rank]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(12))], lr=0.1)
        with fastps.DistributedOptimizer(optimizer, sync="bsp", timeout_s=60) as wrapped:
            wrapped.step()

    with nodes.rendezvous() as port:
        children = nodes.start((1, 1), port, work)
        processes.finish(children, 90)
    outcomes = [str(child.outcome) for child in children]
    assert all(message in outcome for outcome in outcomes), outcomes
    assert children[1].outcome[0] == "AttachError", "not a loss, after which launchers try again"
    assert not any(secret and secret in outcome for secret in secrets for outcome in outcomes)
