"""The rooms of a replica's lanes: which round is due, what counts, and what is published since it was given away."""

import numpy as np

from fastps.job.layout import Layout, place
from fastps.job.limits import ROOM_HEADER_BYTES
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD
from fastps.store.lane_room import PUBLISHED, VALID, LaneRooms, PublishedState, words_of
from fastps.store.store import Store


def _store(workers: int, extra_bytes: int) -> Store:
    parameters = place([("w", (4,), (1,), 0)])
    layout = Layout(parameters, 1, SGD(0.1).rule, parse_policy("bsp"), workers, extra_bytes=extra_bytes)
    return Store.create_for(layout, lambda views: None, [SGD(0.1).hyper])


def test_a_room_has_the_lanes_own_slot_and_those_for_other_nodes() -> None:
    with _store(2, 3 * 256) as store:
        rooms = LaneRooms(store, 256)
        assert [len(slot) for slot in rooms.own] == [256] * 2
        assert [len(slot) for slot in rooms.others] == [256] * 4
        rooms.others[3][:] = 7
        assert store.extra_view(1)[-1] == 7
        assert LaneRooms(store, 0).others == []


def test_a_round_is_due_once_all_live_workers_have_published_and_until_the_others_have_come() -> None:
    with _store(2, ROOM_HEADER_BYTES) as store, store.attach(0) as one, store.attach(1):
        rooms = LaneRooms(store, 0)
        words_of(rooms.own[0])[[VALID, PUBLISHED]] = 1, 1
        assert rooms.due() == 0
        words_of(rooms.own[1])[[VALID, PUBLISHED]] = 1, 1
        assert rooms.due() == 1
        assert len(rooms.kept()) == 2
        rooms.gathered = 1
        assert (rooms.due(), rooms.gathered, rooms.have_started) == (0, 1, False)
        one.leave()
        words_of(rooms.own[1])[PUBLISHED] = 2
        assert rooms.due() == 2, "the other has left"


def test_what_is_published_is_new_until_it_is_given() -> None:
    with _store(2, ROOM_HEADER_BYTES) as store:
        rooms = LaneRooms(store, 0)
        published = PublishedState(rooms)
        assert not published.is_new()
        rooms.count_publication(1)
        assert published.is_new()
        rooms.count_publication(0)
        published.take()  # what there was at the last look
        assert published.is_new()
        published.take()
        assert not published.is_new()
        rooms.set_stale(1, 1 << 58 | 5)
        assert (rooms.stale(0), rooms.stale(1)) == (0, 1 << 58 | 5)
        assert np.count_nonzero(store.extra_view(0)) > 0
