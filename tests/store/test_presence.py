"""The presence bitmap of a push: dense parameters always, tables only where rows were given."""

from fastps.job.layout import place
from fastps.store.row_slots import Presence, presence_of

ROWS = [("d", (3,), (1,), 0), ("t", (4, 2), (2, 1), 0), ("u", (4, 2), (2, 1), 0)]


def test_a_push_has_the_tables_that_got_rows_since_the_last_one() -> None:
    presence = Presence(place(ROWS, tables={1, 2}))
    presence.add(2)
    assert presence.take() == presence_of([0, 2], 3)
    assert presence.take() == presence_of([0], 3)


def test_a_push_without_tables_has_everything() -> None:
    assert Presence(place(ROWS)).take() == presence_of([0, 1, 2], 3)


def test_bits_fill_whole_words() -> None:
    assert presence_of([63, 64], 65) == bytes([0] * 7 + [128, 1] + [0] * 7)
