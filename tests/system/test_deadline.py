"""A wait's timeout counts only the time in which the process could run."""

from fastps.system.deadline import AWAY_NS, Deadline

SECOND_NS = 1_000_000_000


def test_a_wait_that_is_polled_ends_after_its_timeout() -> None:
    patience = Deadline(5 * SECOND_NS, 3 * SECOND_NS)
    over = [patience.is_over(5 * SECOND_NS + tenths * SECOND_NS // 10) for tenths in range(32)]
    assert over == [False] * 30 + [True] * 2


def test_time_in_which_the_process_was_suspended_does_not_count() -> None:
    patience = Deadline(0, 3 * SECOND_NS)
    assert not patience.is_over(SECOND_NS)
    assert not patience.is_over(1000 * SECOND_NS), "away for 999 s"
    assert not patience.is_over(1001 * SECOND_NS)
    assert patience.is_over(1002 * SECOND_NS)


def test_a_gap_of_up_to_a_second_is_a_busy_machine_and_counts() -> None:
    patience = Deadline(0, 2 * AWAY_NS)
    assert not patience.is_over(AWAY_NS)
    assert patience.is_over(2 * AWAY_NS)
