"""What a replay does other than the recorded run: pushes that it leaves out, and pushes computed with newer weights.

A push that is left out becomes a step without a gradient, so every other push keeps its place and its version. A fresh push
reads, in each shard, the newest version that there is before it counts. What its worker does later cannot read older versions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastps.errors import UsageError
from fastps.lab.virtual.driver import RECEIVE
from fastps.lab.virtual.recorded import Recorded, Steps

Place = tuple[int, int]
"""A lane, and the position of a push."""


@dataclass(frozen=True)
class Counterfactual:
    """The changes to a recorded run, of which `recorded` has the reads.

    Attributes:
        pause: the worker and the step that runs under pdb, or "".
        left_out: the pushes that become steps without a gradient.
        fresh: the pushes that read other versions than they did.
        sentences: what is other than recorded, and what that forced.
    """

    recorded: Recorded
    pause: str = ""
    left_out: frozenset[Place] = frozenset()
    fresh: frozenset[Place] = frozenset()
    sentences: tuple[str, ...] = ()

    @property
    def changed(self) -> frozenset[Place]:
        """The pushes after whose commits weights are no longer those of the recorded run."""
        return self.left_out | self.fresh


def counterfactual_of(
    recorded: Recorded, without: Sequence[str] = (), fresh: Sequence[str] = (), pause: str = ""
) -> Counterfactual:
    """Read changes as options have them: "2:140", a push by its worker and step, or for `without` "2", all of a worker.

    Raises UsageError for a push that the recorded run has not, or that was dropped and so has nothing to be fresh for.
    """
    found, left_out, sentences = recorded, set[Place](), list[str]()
    for text in without:
        places = _places(recorded, "--without", text, all_of=True)
        left_out |= places
        what = (
            "its push is left out, as if the step" if ":" in text else f"its {len(places)} pushes are left out, as if the steps"
        )
        sentences.append(f"{_name(text)}: {what} had no gradient; every other push keeps its place")
    before = _newest(recorded) if fresh else {}
    changed = set[Place]()
    for text in fresh:
        for worker, position in sorted(_places(recorded, "--fresh", text)):
            steps = found.steps[worker]
            if steps.dropped[position] or (worker, position) not in before:
                raise UsageError(f"--fresh {text}: expected a push that counted, found one that was dropped or not decided")
            made, forced, sentence = _fresh(steps, position, before[worker, position])
            found = replace(found, steps=[made if lane == worker else each for lane, each in enumerate(found.steps)])
            changed |= {(worker, at) for at in [position, *forced]}
            sentences.append(f"{_name(text)}: {sentence}")
    if pause:
        _places(recorded, "--pause", pause)
    return Counterfactual(found, pause, frozenset(left_out), frozenset(changed), tuple(sentences))


def _places(recorded: Recorded, option: str, text: str, *, all_of: bool = False) -> set[Place]:
    """The pushes that an option names. Raises UsageError."""
    worker_text, colon, step_text = text.partition(":")
    if not (worker_text.isdecimal() and (step_text.isdecimal() if colon else all_of)):
        form = "a worker, or a worker and a step, as in 2 or 2:140" if all_of else "a worker and a step, as in 2:140"
        raise UsageError(f"{option}: expected {form}, found {text!r}")
    worker = int(worker_text)
    if worker >= len(recorded.steps):
        raise UsageError(f"{option} {text}: expected a worker from 0 to {len(recorded.steps) - 1}, found {worker}")
    steps = recorded.steps[worker]
    everything = {(worker, at) for owner in steps.owners for at in range(owner.first, owner.end)}
    places = {(worker, at) for at in steps.positions(int(step_text))} if colon else everything
    if not places:
        pushed = [int(steps.numbers[at]) for _, at in everything]
        has = f"steps {min(pushed)} to {max(pushed)}" if pushed else "none"
        raise UsageError(f"{option} {text}: expected a step that worker {worker} pushed in the recorded run ({has})")
    return places


def _newest(recorded: Recorded) -> Mapping[Place, list[int]]:
    """The version of each shard just before each push counted there."""
    found: dict[Place, list[int]] = {}
    for commits in recorded.commits:
        version = 0
        for commit in commits:
            for event in commit:
                if event.kind == RECEIVE:
                    found.setdefault((event.worker, event.detail), []).append(version)
            version = commit[0].version
    return {place: versions for place, versions in found.items() if len(versions) == recorded.shards}


def _fresh(steps: Steps, position: int, versions: list[int]) -> tuple[Steps, list[int], str]:
    """A lane's steps with one that reads these versions; the later positions that this forces to read them, too; a sentence."""
    reads, timestamps = steps.reads.copy(), steps.timestamps.copy()
    owner = next(each for each in steps.owners if each.first <= position < each.end)
    reads[position] = versions
    reads[position:] = np.maximum.accumulate(reads[position:])
    places = np.flatnonzero((reads != steps.reads).any(axis=1))
    timestamps[places] = reads[places].min(axis=1)
    forced = [int(at) for at in places if position < at < owner.end]
    old, new = ("/".join(map(str, each)) for each in (steps.reads[position].tolist(), versions))
    sentence = f"computed with version {new} instead of {old}"
    if forced:
        numbers = steps.numbers[forced]
        sentence += f"; forced: steps {numbers.min()} to {numbers.max()} read no older one, as they did in the recorded run"
    return replace(steps, reads=reads, timestamps=timestamps), forced, sentence


def _name(text: str) -> str:
    worker, colon, step = text.partition(":")
    return f"worker {worker}, step {step}" if colon else f"worker {worker}"
