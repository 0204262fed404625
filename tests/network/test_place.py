"""How a job of several nodes ends follows from how its nodes do."""

import pytest

from fastps.errors import AttachError, NodeLostError, UsageError
from fastps.network.place import End, Place, end_of_job
from fastps.system.processes import start_child

pytestmark = pytest.mark.unit

GOOD = End(0, order=1)
LOST = End(75, "its agent was killed", 2)
FAILED = End(1, "worker 3 failed first", 3)


@pytest.mark.parametrize(("ends", "goes_on", "expected"), [
    pytest.param([GOOD, GOOD], False, (0, ""), id="all nodes ended well"),
    pytest.param([GOOD, LOST], False, (75, "node 1: its agent was killed"), id="one was lost"),
    pytest.param([LOST, FAILED], False, (1, "node 1: worker 3 failed first"), id="an error of a script counts before a loss"),
    pytest.param([LOST, End(75, "its worker died", 1)], False, (75, "node 1: its worker died"), id="first loss"),
    pytest.param([GOOD, End(143, "it was ended by SIGTERM", 2)], False, (75, "node 1: it was ended by SIGTERM"), id="SIGTERM"),
    pytest.param([GOOD, End(130, "it was ended by SIGINT", 2)], False, (1, "node 1: it was ended by SIGINT"), id="Ctrl-C"),
    pytest.param([End(0, order=9), LOST], True, (0, ""), id="a loss that the job went on without"),
    pytest.param([GOOD, LOST], True, (75, "node 1: its agent was killed"), id="a loss after the end of the others"),
    pytest.param([LOST, End(0, order=9)], True, (75, "node 0: its agent was killed"), id="without node 0 none goes on"),
])  # fmt: skip
def test_the_end_of_a_job_follows_from_the_ends_of_its_nodes(ends: list[End], goes_on: bool, expected: tuple[int, str]) -> None:
    found = end_of_job(dict(enumerate(ends)), goes_on)
    assert (found.code, found.reason) == expected


@pytest.mark.parametrize(("line", "kind"), [
    ('{"error": "found another", "kind": "UsageError"}', UsageError),
    ('{"error": "it did not come", "kind": "NodeLostError"}', NodeLostError),
    ('{"error": "a firewall", "kind": "AttachError"}', AttachError),
    ("", AttachError),
    ("killed", NodeLostError),
])  # fmt: skip
def test_a_launcher_hears_why_the_nodes_did_not_meet(line: str, kind: type[Exception]) -> None:
    command = ["sh", "-c", "kill -9 $$"] if line == "killed" else ["printf", "%s", line]
    with start_child(command, stdout=-1) as process, pytest.raises(kind):
        Place.told_by(process)
