"""Lost, replaced and additional workers, with real processes and without torch: nobody waits for the dead, joiners count."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fastps
from fastps.kernels.shm.arena import LANE_DEAD, LANE_LIVE
from tests.support import descriptors, processes

AMOUNT = np.float32(1.0 / 1024)
SPECS = ["bsp", "asp", "ssp:2", "dssp:1,4", "softsync:2", "backup:1", "psp:2,0.5", "hardsync:4", "r2sp:0.5", "adv:2"]


def _store(sync: str, workers: int = 3, **options: object) -> fastps.Store:
    weights = {"a": np.ones(40, np.float32), "b": np.ones(9, np.float32)}
    settings: dict[str, object] = {"on_worker_loss": "continue", "timeout_s": 20.0, **options}
    return fastps.Store.create(weights, fastps.SGD(lr=1.0), sync=sync, workers=workers, **settings)  # type: ignore[arg-type]


def _until(
    store: fastps.Store, rank: int | None, clock: int, pause_s: float = 0.002, dead: Sequence[int] = ()
) -> Callable[[], tuple[int, int, int]]:
    """Work until the clock, and until these lanes are dead; returns (pushes, the clock at which it began, generation)."""

    def work() -> tuple[int, int, int]:
        with store.attach(rank) as worker:
            while worker.steps < clock or any(store.arena.lane_state(lane) != LANE_DEAD for lane in dead):
                for view in worker.gradients.values():
                    view[...] = AMOUNT
                worker.push(store.hypers, samples=4)
                worker.advance()
                worker.pull()
                assert all(len(set(values.tolist())) == 1 for values in worker.weights.values()), "two versions at once"
                time.sleep(pause_s)
            return worker.own_steps, worker.begun_at, worker.generation

    return work


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sync", SPECS)
def test_the_others_go_on_without_the_dead_and_with_who_comes_in_its_place_and_more(sync: str) -> None:
    with _store(sync, max_workers=4) as store:
        children = [processes.start(_until(store, rank, 10**6 if rank == 1 else 100)) for rank in range(3)]
        processes.wait_until(lambda: store.version >= 15 and all(store.arena.clock(rank) > 0 for rank in range(3)))
        os.kill(children[1].process_id, signal.SIGKILL)
        children += [processes.start(_until(store, 3, 100)), processes.start(_until(store, 1, 100))]
        processes.finish(children, 40)
        assert [child.exit_code for child in children] == [0, -signal.SIGKILL, 0, 0, 0], [child.outcome for child in children]
        for child in children[3:]:
            pushes, began, generation = child.outcome
            assert (pushes, generation) == (100 - began, 1)
            assert began > 0, "a joiner begins at the slowest worker's clock"
        for values in store.weight_views(store.committed()[0]):
            assert np.isfinite(values).all()
            if sync in ("asp", "ssp:2", "dssp:1,4", "r2sp:0.5"):  # every push is one update: the push log is the version
                assert values[0] == 1.0 - store.version / 1024
                assert sum(store.arena.counters(lane)["folded"] for lane in range(4)) == store.version


@pytest.mark.parametrize("sync", ["bsp", "asp", "ssp:2"])
def test_all_but_one_may_die(sync: str) -> None:
    with _store(sync, workers=4) as store:
        children = [processes.start(_until(store, rank, 10**6)) for rank in range(3)]
        children.append(processes.start(_until(store, 3, 80, dead=range(3))))
        processes.wait_until(lambda: store.version >= 8 and all(store.arena.clock(rank) > 0 for rank in range(3)))
        for victim in range(3):
            os.kill(children[victim].process_id, signal.SIGKILL)
            time.sleep(0.01)
        processes.finish(children, 40)
        assert children[3].exit_code == 0, children[3].outcome
        assert [store.arena.lane_state(lane) for lane in range(3)] == [LANE_DEAD] * 3


def test_a_job_whose_workers_all_died_goes_on_with_the_next() -> None:
    with _store("ssp:1", workers=2) as store:
        children = [processes.start(_until(store, rank, 10**6)) for rank in range(2)]
        processes.wait_until(lambda: store.version >= 20)
        processes.kill(*children)
        before = store.version
        replacements = [processes.start(_until(store, rank, before + 40, 0.0)) for rank in range(2)]
        processes.results(replacements, 30)
        assert store.version >= before + 40


@pytest.mark.slow
def test_a_lane_may_change_hands_many_times() -> None:
    """Each owner is killed while it works, and the next comes at once: by generation, nothing of one is taken for another's."""
    with _store("asp", workers=2) as store:
        steady = processes.start(_until(store, 0, 700, 0.001))
        owners = []
        for generation in range(12):
            owners.append(processes.start(_until(store, 1, 10**6, 0.0)))
            processes.wait_until(
                lambda generation=generation: (
                    store.arena.members()[1] == (generation, LANE_LIVE) and store.arena.counters(1)["posted"] > 3 * generation
                )
            )
            time.sleep(0.005)
            os.kill(owners[-1].process_id, signal.SIGKILL)
        processes.finish([steady, *owners], 40)
        assert steady.exit_code == 0, steady.outcome
        assert store.weight_views(store.committed()[0])[0][0] == 1.0 - store.version / 1024
        assert store.arena.generation(1) == 11


def test_a_worker_that_raises_is_lost_like_one_that_died() -> None:
    with _store("bsp", workers=2) as store:

        def fail() -> None:
            with store.attach(1) as worker:
                worker.step({"a": np.zeros(40), "b": np.zeros(9)})
                raise RuntimeError("the disk is on fire")

        children = [processes.start(_until(store, 0, 40)), processes.start(fail)]
        processes.finish(children, 20)
        assert children[0].outcome == (40, 0, 0)


def test_a_worker_that_left_may_come_back() -> None:
    with _store("ssp:3", workers=2) as store:
        first = processes.start(_until(store, 1, 20))
        steady = processes.start(_until(store, 0, 120))
        processes.finish([first], 20)
        again = processes.start(_until(store, 1, 120))
        processes.finish([steady, again], 20)
        assert (steady.exit_code, again.exit_code) == (0, 0)
        assert again.outcome[2] == 1


def test_a_worker_that_leaves_and_comes_back_in_a_living_process_costs_the_others_no_descriptor() -> None:
    """The agent of node 0 has the lanes of all nodes, so it lives on when a lane changes hands."""
    with _store("asp", workers=2) as store, store.attach(0) as stays:
        counts = []
        for _ in range(6):
            with store.attach(1) as comes:
                stays.check_peers()
                comes.step()
            counts.append(descriptors.opened().count("anon_inode:[pidfd]"))
        assert counts[1:] == [counts[1]] * 5, counts


def test_more_workers_than_stated_are_refused() -> None:
    with _store("asp", workers=1, max_workers=2) as store, store.attach(0), store.attach() as second:
        assert (second.rank, second.generation) == (1, 1)
        with pytest.raises(fastps.AttachError, match="expected a free lane of 2, found none"):
            store.attach()
        with pytest.raises(fastps.AttachError, match="made for 2 workers"):
            store.attach(2)


def test_fewer_lanes_than_workers_are_wrong_usage() -> None:
    with pytest.raises(fastps.UsageError, match="max_workers of at least the 3 workers"):
        _store("asp", workers=3, max_workers=2)


def test_a_lane_that_somebody_has_is_not_given_away() -> None:
    with _store("asp", workers=2) as store, store.attach(0), pytest.raises(fastps.AttachError, match="another process answers"):
        store.attach(0)


def test_a_dead_workers_pins_count_no_more() -> None:
    with _store("asp", workers=2) as store, store.attach(0) as worker:
        other = processes.start(_until(store, 1, 10**6))
        processes.wait_until(lambda: store.arena.counters(1)["posted"] > 0)
        processes.kill(other)
        pinned = store.arena.pins()[1]
        seen = set()
        processes.wait_until(
            lambda: worker.step({"a": np.zeros(40), "b": np.zeros(9)}) is None and store.arena.lane_state(1) == LANE_DEAD
        )
        for _ in range(2 * store.arena.buffers):
            worker.step({"a": np.zeros(40), "b": np.zeros(9)})
            seen.add(store.arena.committed()[1])
        assert pinned < 0 or pinned > max(seen) or pinned in seen


def test_several_threads_of_a_worker_may_look_at_the_same_time() -> None:
    """The threads of a node that has homes on several nodes do."""
    with _store("bsp", 2) as store, store.attach(0) as worker, store.attach(1):
        with ThreadPoolExecutor(4) as threads:
            looks = [threads.submit(lambda: [worker.check_peers() for _ in range(2_000)]) for _ in range(4)]
        assert [look.exception() for look in looks] == [None] * 4
