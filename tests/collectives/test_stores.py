"""The choice between two kinds of stores: it finds the faster, and notices when the other becomes faster."""

from fastps.collectives.stores import StoreChoice


def _used(choice: StoreChoice, plain: float, streamed: float, times: int) -> list[bool]:
    used = []
    for _ in range(times):
        used.append(choice.following())
        choice.note(streamed if used[-1] else plain)
    return used


def test_the_faster_kind_is_used_and_the_other_tried_now_and_then() -> None:
    for plain, streamed in ((1.0, 2.0), (2.0, 1.0)):
        used = _used(StoreChoice(), plain, streamed, 300)
        assert 0.85 < used.count(streamed < plain) / len(used) < 0.97


def test_a_machine_that_changes_is_noticed_within_some_collectives() -> None:
    choice = StoreChoice()
    assert _used(choice, 1.0, 2.0, 20)[-1] is False
    assert _used(choice, 6.0, 2.0, 20)[-1] is True
    assert _used(choice, 1.0, 2.0, 150)[-1] is False
