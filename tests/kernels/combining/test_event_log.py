"""What a lane logs of its commits: in order, in a file, and nothing before it is asked to."""

import os
from pathlib import Path

import numpy as np

from fastps import SGD, Store
from fastps.kernels.protocol.lane import DONE, KIND_LEAVE, KIND_NULL, Lane
from fastps.tracing.file import EVENT_DEATH, EVENT_DTYPE, EVENT_JOIN, EVENT_LEAVE, EVENT_NULL


def logged(combiner: Lane, file: Path) -> Path:
    combiner.log_events([os.open(file, os.O_RDWR | os.O_CREAT)])
    return file


def events_of(file: Path) -> np.ndarray:
    """Published events, as they lie in the file."""
    data = file.read_bytes()
    events = np.frombuffer(data, EVENT_DTYPE, len(data) // EVENT_DTYPE.itemsize)
    return events[events["written"] == 1]


def test_a_lane_logs_the_events_of_its_commits_in_order(tmp_path: Path) -> None:
    with Store.create({"w": np.ones(3, np.float32)}, SGD(lr=1.0), sync="bsp", workers=2) as store:
        lanes, combiner = [Lane(store.arena, rank) for rank in range(2)], Lane(store.arena, 0)
        lanes[0].post(KIND_NULL, 0, 0, 0, 100)
        assert combiner.try_combine(1_000) == DONE
        file = logged(combiner, tmp_path / "events")
        assert not len(events_of(file))
        lanes[1].post(KIND_NULL, 0, 0, 0, 50)  # before the first one's time, and received behind it
        lanes[1].post(KIND_LEAVE, 1, 0, 1, 200)
        assert combiner.try_combine(1_000) == DONE
        events = events_of(file)
        assert events["kind"].tolist() == [EVENT_NULL, EVENT_LEAVE]
        assert events["worker"].tolist() == [1, 1] and events["position"].tolist() == [0, 1]
        assert events["at_ns"].tolist() == [100, 200], "the scheduler's time never goes back"
        assert events["commit"].tolist() == [3, 4] and events["order"].tolist() == [0, 0]
        assert events["version"].tolist() == [1, 1]
        combiner.log_events([])
        lanes[0].post(KIND_LEAVE, 1, 0, 1, 300)
        assert combiner.try_combine(1_000) == DONE
        assert len(events_of(file)) == 2, "the log has ended"


def test_a_log_grows_with_its_file(tmp_path: Path) -> None:
    with Store.create({"w": np.ones(3, np.float32)}, SGD(lr=1.0), sync="asp") as store:
        lane = Lane(store.arena, 0)
        file = logged(lane, tmp_path / "events")
        for step in range(9_000):
            lane.post(KIND_NULL, step, 0, step, step)
            assert lane.try_combine(step) == DONE
        assert events_of(file)["position"].tolist() == list(range(9_000))


def test_deaths_and_joins_are_logged_and_played_again(tmp_path: Path) -> None:
    """A worker dies behind two pushes, and its lane's next owner comes before the second one is decided."""
    files = []
    for played in (False, True):
        with Store.create({"w": np.ones(3, np.float32)}, SGD(lr=1.0), sync="asp", workers=2) as store:
            arena, lanes = store.arena, [Lane(store.arena, rank) for rank in range(2)]
            arena.claim(0, os.getpid())
            arena.claim(1, os.getpid())
            files.append(logged(lanes[0], tmp_path / f"events-{played}"))
            lanes[1].post(KIND_NULL, 0, 0, 0, 100)
            assert (lanes[0].play(0, [(1, 100)]) if played else lanes[0].try_combine(200)) == DONE
            lanes[1].post(KIND_NULL, 1, 0, 1, 300)
            assert arena.mark_dead(1, 0) and arena.claim(1, os.getpid(), True) == 1
            if played:
                assert lanes[0].play(0, [(1, 300), (-3, 400), (-3, 400)]) == DONE
                assert lanes[0].play(0, [(-2, 400)]) == DONE, "worker 0 neither died nor joins"
            else:
                assert lanes[0].try_combine(400) == DONE
            assert [arena.counters(lane)["done"] for lane in range(2)] == [0, 2]
            events = events_of(files[-1])
            assert events["kind"].tolist() == [EVENT_NULL, EVENT_NULL, EVENT_DEATH, EVENT_JOIN]
            assert events["position"].tolist() == [0, 1, 2, 2] and events["at_ns"].tolist() == [100, 300, 400, 400]
    assert events_of(files[0]).tobytes() == events_of(files[1]).tobytes()
