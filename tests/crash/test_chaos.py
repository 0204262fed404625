"""The simulated world: a thousand seeds have no violation, a seed repeats its history, and every mutant is found."""

from collections import Counter

import pytest

hooks = pytest.importorskip("fastps.kernels.chaos.failpoints", reason="needs the failpoint build: make test-hooks")

from fastps.kernels.chaos.publishing import Publishing  # noqa: E402
from fastps.kernels.chaos.world import World  # noqa: E402
from fastps.lab.worlds import chaos, chaos_worlds  # noqa: E402
from tests.support.sizes import sample_and_full  # noqa: E402

# The number of seeds, from 0 on, that find each mutant, with a margin; docs/reliability.md lists the first seed for each.
FOUND_WITHIN = {
    "keep-turn": 5, "take-without-comparing": 200, "forget-pending": 200, "flip-first": 5, "forget-cursor": 5,
    "forget-recheck": 2_000, "forget-pins": 200, "forget-ready": 300, "acknowledge-first": 5, "tail-first": 100,
    "forget-helpers": 400, "done-first": 6_000, "forget-heads": 1_000, "forget-generation": 100, "state-in-place": 10,
    "row-first": 1_000, "one-count": 2_000, "forget-undo": 300, "keep-undo": 50, "rows-late": 20, "same-workspace": 200,
    "follow-commit": 500, "forget-confirm": 500, "forget-left": 6_000, "heads-back": 3_000, "forget-ring": 400,
    "read-expelled": 300, "forget-call": 50, "call-late": 200, "forget-taking-over": 20, "serve-on": 200,
    "write-through": 5,
}  # fmt: skip
# Seeds whose processes are readers, too, and what is found.
FOUND_BY_READERS = {
    "forget-readers": (50, "torn read: reader"),
    "forget-wanted": (50, "missed wake: reader"),
    "look-first": (6_000, "missed wake: reader"),
    "event-late": (8_000, "missed wake: reader"),
    "carry-late": (50, "torn tensors: reader"),
    "give-back-blind": (8_000, ""),  # the buffer in use is among the last: many were pinned before
}
# Seeds whose worker publishes, and what is found.
FOUND_BESIDE_PUBLISHERS = {
    "spare-pinned": (50, "torn tensors: reader"),
    "publish-first": (5, "flip: version 1 is not whole"),
    "forget-readers": (50, "torn tensors: reader"),
    "forget-wanted": (50, "missed wake: reader"),
    "look-first": (400, "missed wake: reader"),
    "forget-recheck": (1_500, "torn tensors: reader"),
    "give-back-blind": (3_000, "torn tensors: reader"),
    "flip-first": (5, "flip: version 1 follows version 0"),
}
# The first two need a commit between two words that a reader touches one after the other, the last many pins before it.
RARELY_FOUND_BY_READERS = ("look-first", "event-late", "give-back-blind")
# A case of its own: tests/crash/test_stop_at_every_store.py.
FOUND_ELSEWHERE = ("back-early",)
# Seeds among which the others are found: the first is far from 0.
RARELY_FOUND_IN = {
    "break-at-once": range(60_970, 61_020),  # needs a dead combiner, a stopped helper, and a push in between
    "first-clock": range(7_450, 7_500),  # needs a fold in another shard between the first's admission of a joiner and its own
}


def test_a_thousand_seeds_violate_nothing_and_see_every_kind_of_fault() -> None:
    findings = chaos.simulate(0, 1_000)
    assert findings.violations == []
    assert findings.seeds == 1_000
    assert findings.steps > 1_000_000
    assert findings.versions > 10_000
    assert all(count > 100 for count in findings.faults.values()), findings.faults
    assert findings.worst_detection_s > 0


def test_pushes_that_are_folded_as_one_sum_are_folded_once_whatever_happens() -> None:
    """Run the jobs of disciplines that fold each push again, with the pushes of each drain combined."""
    world, played, flips = World(), 0, 0
    for seed in range(600):
        plan = chaos_worlds.plan_of(seed)
        if plan.measures["policy"]["fold"] != "each":
            continue
        measures = {**plan.measures, "is_sum": True, "policy": {**plan.measures["policy"], "combine": True}}
        outcome = world.run(seed, **measures)
        assert outcome["violation"] is None, f"seed {seed}, {plan.spec}: {outcome['violation']}"
        played += 1
        flips += outcome["flips"]
    assert played > 150 and flips > 1_000


def _violations_with_readers(seeds: int, until: str = "") -> list[str]:
    """Run seeds whose processes also read published weights as readers, each in the place of its lane's number.

    The first violation that has the text `until` is the last.
    """
    world, found = World(), []
    for seed in range(seeds):
        plan = chaos_worlds.plan_of(seed)
        outcome = world.run(seed, **plan.measures, reads=True)
        if outcome["violation"] is not None:
            found.append(f"seed {seed}, {plan.spec}: {outcome['violation']}")
            if until and until in found[-1]:
                break
    return found


@sample_and_full(300, 1_000, "seeds")
def test_what_a_reader_has_pinned_never_changes_and_costs_no_worker_its_buffer_and_no_wake_is_missed(seeds: int) -> None:
    """Processes are stopped and killed while they read and sleep as readers, and others take their places."""
    assert _violations_with_readers(seeds) == []


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, marks=[pytest.mark.slow] * (each in RARELY_FOUND_BY_READERS)) for each in FOUND_BY_READERS]
)
@pytest.mark.timeout(600)
def test_a_mutant_that_only_readers_see_is_found(mutant: str) -> None:
    seeds, expected = FOUND_BY_READERS[mutant]
    hooks.switch_on(mutant)
    try:
        found = _violations_with_readers(seeds, expected)
    finally:
        hooks.switch_on(None)
    assert found and expected in found[-1], found
    assert chaos.simulate(0, 20, mutant=mutant).violations == []


def _publish(seeds: int, *, stop: bool = False) -> tuple[list[str], Counter[str]]:
    """Play seeds whose worker publishes beside readers that come, detach and die; returns violations, and counts by kind."""
    found, counts = [], Counter[str]()
    for seed in range(seeds):
        measures = chaos_worlds.publishing_of(seed)
        outcome = Publishing(seed, **measures).run(0.0)
        if violation := outcome.pop("violation"):
            found.append(f"seed {seed}: {violation}")
            if stop:
                break
        counts.update(outcome, cut_off=outcome["flips"] < measures["versions"])
    return found, counts


@sample_and_full(1_000, 20_000, "seeds")
def test_a_publisher_that_dies_anywhere_leaves_a_whole_version_and_no_reader_sees_another(seeds: int) -> None:
    found, counts = _publish(seeds)
    assert found == []
    assert counts["flips"] > 10 * seeds / 2 and counts["cut_off"] > seeds / 10 and counts["restarts"] > seeds / 20, counts


@pytest.mark.parametrize("mutant", FOUND_BESIDE_PUBLISHERS)
def test_a_mutant_is_found_beside_a_publisher(mutant: str) -> None:
    seeds, expected = FOUND_BESIDE_PUBLISHERS[mutant]
    hooks.switch_on(mutant)
    try:
        found, _ = _publish(seeds, stop=True)
    finally:
        hooks.switch_on(None)
    assert found and expected in found[-1], found


def test_a_seed_plays_the_same_history_again() -> None:
    world, plans = World(), [chaos_worlds.plan_of(seed) for seed in range(40)]
    first = [world.run(plan.seed, **plan.measures) for plan in plans]
    again = [world.run(plan.seed, **plan.measures) for plan in reversed(plans)]
    assert first == again[::-1]
    assert len({outcome["events"] for outcome in first}) > 30


def test_seeds_draw_every_discipline_and_every_number_of_crashes() -> None:
    plans = [chaos_worlds.plan_of(seed) for seed in range(500)]
    assert {plan.spec for plan in plans} == set(chaos_worlds.SPECS)
    assert {plan.measures["crashes"] for plan in plans} == {0, 1, 2, 3, 4}
    assert {plan.measures["helpers"] > 0 for plan in plans} == {True, False}
    assert {plan.measures["wounds"] for plan in plans} == {0, 1, 4}
    assert {plan.measures["server"] for plan in plans} == {True, False}


def test_all_mutants_are_looked_for() -> None:
    looked_for = {*FOUND_WITHIN, *FOUND_BY_READERS, *FOUND_BESIDE_PUBLISHERS, *FOUND_ELSEWHERE, *RARELY_FOUND_IN}
    assert set(hooks.MUTANTS) == looked_for


@pytest.mark.parametrize(
    "mutant", [pytest.param(each, marks=[pytest.mark.slow] * (seeds > 500)) for each, seeds in FOUND_WITHIN.items()]
)
def test_a_mutant_is_found(mutant: str) -> None:
    findings = chaos.simulate(0, FOUND_WITHIN[mutant], mutant=mutant, stop=True)
    assert len(findings.violations) == 1, f"{hooks.MUTANTS[mutant]}: not found in {findings.seeds} seeds"
    replayed = chaos.simulate(findings.violations[0]["seed"], 1, mutant=mutant)
    assert replayed.violations == findings.violations


@sample_and_full(50, 2_000, "seeds")
def test_no_innocent_worker_pays_for_damaged_lanes_whatever_else_happens(seeds: int) -> None:
    """Play seeds that all damage up to four lanes: while their workers push, join, leave and wait, and after their deaths.

    A fault that one seed in 700 has is found with a probability of 0.94 in 2,000 of them.
    """
    world, damaged = World(), 0
    for seed in range(seeds):
        plan = chaos_worlds.plan_of(seed)
        outcome = world.run(seed, **{**plan.measures, "wounds": 4})
        assert outcome["violation"] is None, f"seed {seed}, {plan.spec}: {outcome['violation']}"
        damaged += outcome["damaged_lanes"]
    assert damaged > seeds / 2


@pytest.mark.parametrize("mutant", RARELY_FOUND_IN)
def test_a_mutant_that_needs_several_faults_at_once_is_found(mutant: str) -> None:
    seeds = RARELY_FOUND_IN[mutant]
    assert chaos.simulate(seeds.start, len(seeds), mutant=mutant, stop=True).violations


def test_a_server_may_rest_over_what_an_expelled_owner_left_while_the_next_one_joins() -> None:
    """Its second push is kept for a fold that waits for another worker; the joiner has called, and has posted nothing."""
    assert chaos.simulate(800_407, 1).violations == []


def test_a_mutant_is_off_again_after_its_seeds() -> None:
    assert chaos.simulate(0, 1, mutant="flip-first").violations
    assert not chaos.simulate(0, 1).violations


def test_an_unknown_mutant_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"expected one of keep-turn, .* found 'drop-everything'"):
        hooks.switch_on("drop-everything")
