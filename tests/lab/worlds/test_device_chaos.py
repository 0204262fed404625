"""Jobs on simulated devices by seeds: without violations as they are, and with one as soon as any call is left out."""

import pytest

from fastps.lab.worlds import device_chaos
from fastps.lab.worlds.device_worlds import World
from fastps.lab.worlds.served_worlds import ServedWorld
from tests.support import commands

SEEDS = 40
# Mutants that seeds before this one do not find; all others are found by the first 40.
LATE = {"record-computed-at-the-end": 100}
# With a server that goes on, a worker folds nothing and waits for its own work, and the server's devices fold different shards.
_WITHOUT_SERVER = {
    "record computed at the hook",
    "record computed at the push",
    "fold stream waits for own computed",
    "fold stream waits for others computed",
    "record computed at the end",
    "fold stream waits for others folded",
    "compute stream waits for own folded",
}


# Its own folds are none: test_snapshot has jobs in which the worker that saves has folded.
_IDLE = {"snapshots stream waits for own folded"}


@pytest.mark.slow
def test_seeds_run_without_violations_and_again_the_same() -> None:
    found = device_chaos.simulate(4, 0, SEEDS)
    assert found.violations == [] and found.seeds == SEEDS
    assert all(found.faults[kind] > 3 for kind in ("deaths", "rejoins", "nonfinite", "copies"))
    assert device_chaos.simulate(4, 0, 5) == device_chaos.simulate(4, 0, 5)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mutant", list(device_chaos.MUTANTS))
def test_every_mutant_is_found(mutant: str) -> None:
    found = device_chaos.simulate(4, LATE.get(mutant, 0), SEEDS, mutant=mutant, stop=True)
    assert len(found.violations) == 1, f"{mutant} not found in {SEEDS} seeds"


@pytest.mark.slow
def test_every_call_that_orders_work_has_its_mutant() -> None:
    """A record or a wait that the arena makes and no mutant leaves out would be unproved."""
    for kind, expected in (
        (World, set(device_chaos.CALLS)),
        (ServedWorld, {*device_chaos.CALLS, *device_chaos.SERVED_CALLS} - _WITHOUT_SERVER),
    ):
        seen: set[str] = set()
        for seed in range(40):
            world = kind(seed, 4)
            world.run()
            seen |= world.seen
        assert seen - _IDLE == expected


@pytest.mark.slow
def test_the_command_plays_devices_and_its_exit_code_tells_violations() -> None:
    (row,) = commands.rows("chaos", "--devices", "2", "--seeds", "3")
    assert row["devices"] == 2 and row["seeds"] == 3 and row["violations"] == 0
    broken = commands.fastps("chaos", "--devices", "2", "--seeds", "9", "--mutant", "record-folded")
    assert broken.returncode == 1 and "expected an event between them" in broken.stdout + broken.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_seeds_run_without_violations() -> None:
    assert device_chaos.run(4, 600).violations == [], "40 find every mutant but one, which 140 find"
