"""Sessions by hand: what is sent again over a new edge, and what is refused."""

import pytest

from fastps.errors import ProtocolError
from fastps.network.messages import Header, Kind
from fastps.network.session import HomeSession, LeafSession, NodeRecord


def _joined(parts: int) -> tuple[LeafSession, NodeRecord]:
    leaf, record = LeafSession(11, parts), NodeRecord()
    record.begin(HomeSession(11, parts))
    leaf.welcome(record.answer(leaf.hello()))
    leaf.check_weights(Header(Kind.WEIGHTS, step=0, version=4), 0)
    leaf.took(4)
    return leaf, record


def _session(record: NodeRecord) -> HomeSession:
    assert record.session is not None
    return record.session


def _post(home: HomeSession, parts: int) -> None:
    for _ in range(parts):
        home.post(home.posted % home.parts)


@pytest.mark.parametrize("posted", [0, 1, 2, 3])
def test_a_lost_edge_is_resumed_at_the_first_part_that_the_home_lacks(posted: int) -> None:
    leaf, record = _joined(3)
    home = _session(record)
    assert leaf.begin() == 1
    _post(home, posted)
    leaf.welcome(record.answer(leaf.hello()))
    assert leaf.part == posted
    home.check(Header(Kind.PUSH, step=1, part=leaf.part))
    assert [home.is_missing(1, part) for part in range(3)] == [part >= posted for part in range(3)]


def test_a_push_that_the_home_has_is_known_to_be_so_and_its_weights_may_come_again() -> None:
    leaf, record = _joined(1)
    home = _session(record)
    leaf.begin()
    _post(home, 1)
    home.check(Header(Kind.PUSH, step=1))
    assert not home.is_missing(1, 0)
    answer = Header(Kind.WEIGHTS, step=1, version=5)
    leaf.check_weights(answer, 1)
    leaf.took(answer.version)
    assert not leaf.is_pending
    leaf.welcome(record.answer(leaf.hello()))
    assert leaf.begin() == 2


@pytest.mark.parametrize("told", [1, 2])
@pytest.mark.parametrize(("posted", "dropped"), [(0, 1), (1, 0)])
def test_a_new_lane_drops_a_push_that_never_came_and_counts_steps_from_one_again(posted: int, dropped: int, told: int) -> None:
    """The home may have to tell it twice, because the first edge was lost before the answer came."""
    leaf, record = _joined(1)
    leaf.begin()
    _post(_session(record), posted)
    record.lose()
    record.begin(HomeSession(11, 1))
    answers = [record.answer(leaf.hello()) for _ in range(told)]
    leaf.welcome(answers[-1])
    assert answers[-1].kind == Kind.WELCOME
    assert (leaf.dropped, leaf.must_fetch, leaf.is_pending) == (dropped, True, False)
    again = record.answer(leaf.hello())
    leaf.welcome(again)
    assert again.kind == Kind.RESUME
    assert leaf.must_fetch, "its weights did not come over the edge that is lost"
    leaf.took(9)
    assert leaf.begin() == 1


def test_step_0_is_refused_by_a_home_that_has_no_step_yet() -> None:
    with pytest.raises(ProtocolError, match="expected step 1 from part 0 on, found step 0"):
        HomeSession(1, 3).check(Header(Kind.PUSH, step=0, part=3))


@pytest.mark.parametrize(("step", "part"), [(0, 0), (3, 0), (2, 2), (2, 4), (1, 0), (2**40, 0)])
def test_a_step_that_leaves_something_out_or_is_over_is_refused(step: int, part: int) -> None:
    """The home has step 1 and the first part of step 2, of three parts."""
    home = HomeSession(1, 3)
    _post(home, 4)
    with pytest.raises(ProtocolError, match="expected step 2 from part 1 on"):
        home.check(Header(Kind.PUSH, step=step, part=part))


@pytest.mark.parametrize(("step", "lane"), [(1, 1), (4, 1), (3, 2)])
def test_a_home_that_remembers_other_steps_or_lanes_is_refused(step: int, lane: int) -> None:
    leaf, _ = _joined(1)
    for version in (5, 6, 7):
        leaf.begin()
        leaf.took(version)
    with pytest.raises(ProtocolError, match="expected node 0 to go on at step 3"):
        leaf.welcome(Header(Kind.RESUME, step=step, lane=lane))


def test_weights_of_another_step_or_of_an_earlier_version_are_refused() -> None:
    leaf, _ = _joined(1)
    leaf.begin()
    with pytest.raises(ProtocolError, match="expected the weights of step 1"):
        leaf.check_weights(Header(Kind.WEIGHTS, step=0, version=5), 1)
    with pytest.raises(ProtocolError, match="expected version 4 or a later one"):
        leaf.check_weights(Header(Kind.WEIGHTS, step=1, version=3), 1)


def test_another_agent_of_the_node_is_not_the_owner() -> None:
    assert not HomeSession(1, 1).knows(Header(Kind.HELLO, incarnation=2))
