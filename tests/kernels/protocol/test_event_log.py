"""What a lane logs of its commits: in order, once published, and nothing before it is asked to."""

import numpy as np

from fastps import SGD, Store
from fastps.kernels.protocol.lane import DONE, KIND_LEAVE, KIND_NULL, Lane
from fastps.tracing.file import EVENT_DTYPE, EVENT_LEAVE, EVENT_NULL


def test_a_lane_logs_the_events_of_its_commits_in_order() -> None:
    with Store.create({"w": np.ones(3, np.float32)}, SGD(lr=1.0), sync="bsp", workers=2, job="logged") as store:
        lanes, combiner = [Lane(store.arena, rank) for rank in range(2)], Lane(store.arena, 0)
        assert combiner.take_events() == b""
        lanes[0].post(KIND_NULL, 0, 0, 0, 100)
        assert combiner.try_combine(1_000) == DONE
        combiner.log_events()
        lanes[1].post(KIND_NULL, 0, 0, 0, 50)  # before the first one's time, and received behind it
        lanes[1].post(KIND_LEAVE, 1, 0, 1, 200)
        assert combiner.try_combine(1_000) == DONE
        events = np.frombuffer(combiner.take_events(), EVENT_DTYPE)
        assert events["kind"].tolist() == [EVENT_NULL, EVENT_LEAVE]
        assert events["worker"].tolist() == [1, 1] and events["position"].tolist() == [0, 1]
        assert events["at_ns"].tolist() == [100, 200], "the scheduler's time never goes back"
        assert events["commit"].tolist() == [3, 4] and events["order"].tolist() == [0, 0]
        assert events["version"].tolist() == [1, 1]
        assert combiner.take_events() == b""
