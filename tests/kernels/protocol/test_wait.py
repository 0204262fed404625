"""What a lane wants while it waits: the machine is asked without a driver, a clock or another process."""

from typing import Any

from fastps.kernels.protocol import wait
from fastps.kernels.protocol.lane import AWAITING, BAD_STATE, BUSY, DONE, KIND_LEAVE, UNSERVED, Lane
from fastps.kernels.protocol.wait import Wait
from fastps.kernels.shm.arena import LANE_EXPELLED
from tests.support.plain_arena import ASP, BSP, Job

NOW_NS = 1_000_000_000


def _wait(lane: Lane) -> Wait:
    """A wait of a lane that has just checked its peers."""
    found = Wait(lane)
    found.checked_ns = NOW_NS
    return found


def _waiting(lanes: int, policy: dict[str, Any], **measures: Any) -> tuple[Job, Wait]:
    """A job, and such a wait of its first lane."""
    job = Job(lanes, policy, **measures)
    return job, _wait(job.lanes[0])


def test_a_worker_that_waits_for_a_step_combines_for_the_others() -> None:
    job, waits = _waiting(2, BSP)
    job.post(0, 1.0, NOW_NS)
    waits.begin_step(2, 1, NOW_NS)
    assert waits.want(NOW_NS) == wait.REST
    job.post(1, 1.0, NOW_NS)  # worker 1 does not combine
    assert waits.want(NOW_NS + 7) == wait.NOTHING
    assert waits.last_wait_ns == 7
    assert job.arena.version == 1


def test_a_step_that_is_granted_in_the_first_rest_needs_no_driver() -> None:
    job, waits = _waiting(2, BSP)
    job.post(0, 1.0, NOW_NS)
    assert not waits.take_step(2, 1, NOW_NS) and not job.arena.version, "a first rest combines nothing"
    job.post(1, 1.0, NOW_NS)
    assert waits.want(NOW_NS + 7) == wait.NOTHING, "the driver goes on, and combines"
    assert job.arena.version == 1
    assert waits.take_step(2, 1, NOW_NS)
    late_ns = NOW_NS + wait.SLICE
    assert not waits.take_step(3, 1, late_ns) and waits.want(late_ns) == wait.CHECK_PEERS, "checks of the peers come first"


def test_a_driver_is_told_to_check_the_peers_once_a_slice_and_the_lane_combines_after_it() -> None:
    job, waits = _waiting(2, BSP)
    waits.begin_step(2, 0, NOW_NS)
    late_ns = NOW_NS + wait.SLICE
    assert [waits.want(now_ns) for now_ns in (NOW_NS, late_ns - 1, late_ns, late_ns)] == [
        *(wait.REST, wait.REST, wait.CHECK_PEERS, wait.REST)
    ]
    job.post(0, 1.0, NOW_NS)
    job.post(1, 1.0, NOW_NS)
    assert waits.want(late_ns + wait.SLICE) == wait.CHECK_PEERS
    assert waits.want(late_ns + wait.SLICE) == wait.NOTHING


def test_a_wait_is_not_over_while_the_lane_holds_a_fold_for_a_helper() -> None:
    _, waits = _waiting(1, ASP)
    waits.begin_outcome(AWAITING, NOW_NS)
    assert waits.want(NOW_NS) == wait.REST and waits.held and waits.is_awake
    assert waits.want(NOW_NS) == wait.NOTHING and not waits.held, "the next combine ends it"


def test_what_a_driver_tells_is_the_outcome_of_the_next_combine() -> None:
    _, waits = _waiting(2, BSP)
    for outcome, wanted in ((DONE, wait.NOTHING), (BUSY, wait.NOTHING), (BAD_STATE, wait.FAILURE)):
        waits.begin_outcome(outcome, NOW_NS)
        assert waits.want(NOW_NS) == wanted
    assert waits.outcome == BAD_STATE
    waits.begin_step(2, 0, NOW_NS)
    waits.set_outcome(BAD_STATE)
    assert waits.want(NOW_NS) == wait.FAILURE


def test_a_wait_of_the_drivers_own_pauses_and_leaves_the_lane_alone() -> None:
    job, waits = _waiting(1, ASP)
    job.post(0, 1.0, NOW_NS)
    waits.begin_own(1_234, NOW_NS)
    assert waits.want(NOW_NS) == waits.want(NOW_NS) == wait.PAUSE
    assert waits.slice_ns == 1_234 and job.arena.version == 0


def test_a_wait_of_the_drivers_own_can_combine_between_its_pauses() -> None:
    job, waits = _waiting(1, ASP)
    waits.begin_own(1_234, NOW_NS, combines=True)
    for version in (1, 2):
        job.post(0, 1.0, NOW_NS)
        assert waits.want(NOW_NS) == wait.PAUSE and waits.slice_ns == 1_234
        assert job.arena.version == version
    waits.set_outcome(AWAITING)
    assert waits.want(NOW_NS) == wait.REST and waits.held, "its fold is not over"


def test_a_wait_for_a_step_ends_at_its_deadline_and_rests_no_longer() -> None:
    _, waits = _waiting(2, BSP)
    waits.begin_step(2, 0, NOW_NS, until_ns=NOW_NS + 5_000)
    assert waits.want(NOW_NS + 1_000) == wait.REST and waits.slice_ns == 4_000
    assert waits.want(NOW_NS + 5_000) == wait.NOTHING
    waits.begin_step(2, 0, NOW_NS)
    assert waits.want(NOW_NS + 6_000) == wait.REST and waits.slice_ns == wait.SLICE, "the next wait has no deadline"


def test_the_last_worker_waits_until_every_push_is_decided_and_everybody_has_come() -> None:
    job = Job(3, ASP)
    for lane in (0, 1):
        job.arena.claim(lane, 1)
    waits = _wait(job.lanes[0])
    job.post(1, 1.0, NOW_NS)
    for lane in (0, 1):
        assert job.lanes[lane].post(KIND_LEAVE, 0, 0, 0, NOW_NS)
        job.arena.leave(lane)
    waits.begin_last(3, NOW_NS)
    assert waits.want(NOW_NS) == wait.PAUSE, "worker 2 has not attached"
    assert job.arena.version == 1
    waits.begin_last(2, NOW_NS)
    assert waits.want(NOW_NS) == wait.NOTHING


def test_a_served_worker_calls_the_server_which_combines_once_it_is_called() -> None:
    job = Job(1, ASP, servers=1)
    job.arena.serve(1)
    server = Lane(job.arena, job.arena.server_lane)
    serves, waits = _wait(server), _wait(job.lanes[0])
    job.lanes[0].leave_to_server(True)
    serves.begin_calls(NOW_NS)
    assert serves.want(NOW_NS) == wait.REST
    job.post(0, 1.0, NOW_NS)
    called = server.event()
    waits.begin_outcome(job.lanes[0].try_combine(NOW_NS), NOW_NS)
    assert server.event() != called and job.arena.version == 0
    assert serves.want(NOW_NS) == wait.REST and job.arena.version == 1
    waits.begin_step(0, 1, NOW_NS)
    assert waits.want(NOW_NS) == wait.NOTHING


def test_a_worker_whose_server_has_ended_is_told_to_take_over() -> None:
    job = Job(1, ASP, servers=1)
    job.arena.serve(1)
    job.lanes[0].leave_to_server(True)
    job.arena.finish(job.arena.server_lane)
    job.post(0, 1.0, NOW_NS)
    waits = _wait(job.lanes[0])
    waits.begin_outcome(job.lanes[0].try_combine(NOW_NS), NOW_NS)
    assert waits.want(NOW_NS) == wait.TAKE_OVER
    job.lanes[0].leave_to_server(False)
    assert waits.want(NOW_NS) == wait.NOTHING and job.arena.version == 1


def test_no_wait_ends_between_the_servers_end_and_the_lanes_own_combine() -> None:
    job, waits = _waiting(1, ASP, servers=1)
    job.post(0, 1.0, NOW_NS)
    waits.begin_step(0, 0, NOW_NS)  # reached from the start
    waits.set_outcome(UNSERVED)
    assert waits.want(NOW_NS) == wait.TAKE_OVER
    assert waits.want(NOW_NS) == wait.NOTHING and job.arena.version == 1


def test_a_lane_that_was_expelled_waits_no_longer() -> None:
    job, waits = _waiting(2, BSP)
    job.arena.claim(0, 1)
    waits.begin_step(2, 0, NOW_NS)
    assert waits.want(NOW_NS) == wait.REST
    job.arena.expel(0, 0)
    assert job.arena.lane_state(0) == LANE_EXPELLED
    assert waits.want(NOW_NS) == wait.EXPELLED
