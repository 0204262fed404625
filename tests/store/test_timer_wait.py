"""A wait whose timer is overdue does not eat a core: the holder of the shard lock will fire it, and may be stopped for long."""

import time

import numpy as np

from fastps import SGD, Store, Worker
from fastps.job import limits as config
from fastps.kernels.protocol.wait import REST, Wait

OVERDUE_NS = 200_000
SPEC = "policy:fold=quorum,grant=next-version,count=1,push_timeout=0.002,scale=mean"


def _slice_ns(worker: Worker) -> int:
    """The rest that a wait for a grant begins with."""
    wait, now_ns = Wait(worker.lane), worker.store.clock.now_ns()
    wait.begin_step(99, 0, now_ns)
    assert wait.want(now_ns) == REST
    return wait.slice_ns


def test_an_overdue_timer_is_waited_for_with_a_pause_and_a_coming_one_to_its_deadline() -> None:
    with Store.create({"w": np.ones(4, np.float32)}, SGD(lr=0.1), sync=SPEC, workers=2) as store:
        with store.attach(0) as first, store.attach(1) as second:
            assert _slice_ns(second) == config.SLICE_NS, "no timer"
            first.gradients["w"][:] = 1.0
            first.push(store.hypers)  # its sum is closed 2 ms later
            assert _slice_ns(second) <= 2_000_000
            time.sleep(0.005)
            assert second.lane.due_ns() > 0
            assert _slice_ns(second) == OVERDUE_NS
            second.try_combine()  # fires it
            assert _slice_ns(second) == config.SLICE_NS
            assert store.version == 1
