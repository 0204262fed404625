"""Policies: when gradients are folded, when a worker may go on, what a pull waits for, how a step is scaled.

A policy is data: four small values and the numbers that they need. The named disciplines are rows of a table. The store and the
simulator read the values and know no names. The scheduler makes the decisions.
"""

import math
import numbers
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastps.errors import PolicyError
from fastps.kernels.scheduling.policy import reason_against
from fastps.kernels.shm.counts import MAX_SHARDS

MAX_BOUND = 1_000_000  # above any useful bound; keeps the controller's range (high - low) finite
DEFAULT_SHARDS = 4
MOST_SLOTS = 4
LEAST_WARM_UP = 8  # fewer steps say little, and the advice leaves out the first
MOST_WARM_UP = 10_000

NUMBERS: dict[str, Mapping[str, str]] = {}
"""The values that are numbers of a named spec, with its letters for them, by the name: those of the table of disciplines."""
_KINDS: dict[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a word"),
}

_SCHEDULED = (
    *("fold", "grant", "scale", "low", "high", "release", "hard_bound", "bound", "credit", "combine", "count", "backups"),
    *("divisor", "groups", "relay", "relax", "tune"),
)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One synchronization scheme, as values. Any fold, grant, pull and scale that make sense together may be combined.

    Attributes:
        spec: the canonical text, in the syntax of `fastps.parse_policy`; derived from the values if it is not given.
        fold: "each" push when it arrives; "all" live workers' pushes of one version; the first pushes of a version ("quorum";
            later ones are dropped); a "count" of pushes of any version; one at a time "in-order" of the workers.
        combine: with fold "each": the pushes that one drain finds are folded as one sum, not divided by their number, with
            their mean learning rate and one version, instead of one after the other with a version each.
        grant: a worker goes on "at-once", with the "next-version", while "bounded" ahead of the slowest, or "round-robin".
        scale: "one": unchanged; the "mean" of pushes folded together, or the mean with the learning rate times their number
            ("linear"), times sqrt(samples / reference) ("square-root") or divided by the divisor ("divisor"); each push divided
            by its "staleness"; or with the learning rate times its batch / its worker's first batch ("batch").
        low, high: the bound in steps (s of SSP: low == high; s_L and s_U of DSSP).
        release: when a waiting worker is released (DSSP, Algorithm 1, line 17): "next-push" or "printed".
        hard_bound: `high` is a bound of the lead, not only of the controller's answer (DSSP, Theorem 2).
        bound: the lead that `hard_bound` limits: at a "grant", so that the next push may lead by high + 1, or after a "push".
        credit: how many further steps the controller's answer r* allows: r* + 1, as Algorithm 1 is "listed", or r*, as the
            "prose" and Figure 2 say.
        count: pushes of a quorum (c of PSP-SGD); 0: as many as live workers less `backups`, and at least 1.
        backups: b of backup workers.
        push_timeout: seconds that a quorum waits for more pushes after the c-th (tau1 of PSP-SGD).
        divisor: n of n-softsync: a fold takes floor(workers / n) pushes.
        groups: leaves of Rudra's tree; a leaf passes on the pushes of its workers together. 0: no tree.
        relay: share of its live workers whose pushes a leaf of the tree waits for before it passes them on; 0: all.
        relax: r of R2SP, 0 to 1: the fraction of T / N between two grants.
        tune: the grant carries a batch. With grant "round-robin" (R2SP) the worker then takes as long as the slowest; with fold
            "all" all take equally long, and the sum of their batches stays.
        reference: B of hardsync's sqrt(lambda mu / B), in samples.
        pull: fraction of the shards that a step waits for (b% of PSP-SGD); 1: all.
        pull_timeout: seconds that a step waits for more shards after those (tau2 of PSP-SGD).
        shards: parts of the model that are versioned separately; parameters are not split.
        overlap: push and pull in separate threads while the next gradient is computed (Rudra-adv*).
        warm_up: recorded steps after which DistributedOptimizer changes to the advised discipline (`auto`); 0: never.
        ema: decay of the moving average of the weights that the fold keeps; 0: none.
        clip: global norm to which each push is clipped; 0: no clipping.
        momentum: whose momentum SGD has: the "fold"'s, or each "worker"'s of its own gradients, which then pushes g + mu v.

    Raises PolicyError, with the reason, for values that are out of range or make no sense together.

    >>> Policy(fold="quorum", grant="next-version", backups=1, pull=0.75, shards=4).spec
    'policy:fold=quorum,grant=next-version,backups=1,pull=0.75,shards=4'
    """

    spec: str = ""
    fold: str
    grant: str
    scale: str = ""
    low: int = 0
    high: int = 0
    release: str = "next-push"
    hard_bound: bool = False
    bound: str = "grant"
    credit: str = "listed"
    combine: bool = False
    count: int = 0
    backups: int = 0
    push_timeout: float = 0.0
    divisor: int = 0
    groups: int = 0
    relay: float = 0.0
    relax: float = 0.0
    tune: bool = False
    reference: int = 0
    pull: float = 1.0
    pull_timeout: float = 0.0
    shards: int = 1
    overlap: bool = False
    warm_up: int = 0
    ema: float = 0.0
    clip: float = 0.0
    momentum: str = "fold"

    def __post_init__(self) -> None:
        plain = "one" if self.fold in ("each", "in-order") else "mean"
        if not self.scale:
            object.__setattr__(self, "scale", plain)
        if not self.spec:
            defaults = {name: field.default for name, field in self.__dataclass_fields__.items()} | {"spec": "", "scale": plain}
            values = {name: (getattr(self, name), default) for name, default in defaults.items()}
            object.__setattr__(self, "spec", spec_of("policy", **values))
        fault = next(self._faults(), None)
        if fault is not None:
            raise PolicyError(f"{self.spec}: {fault}")

    def _called(self, name: str) -> str:
        return NUMBERS.get(self.spec.partition(":")[0], {}).get(name, name)

    def _faults(self) -> Iterator[str]:
        """What is wrong with the values, one by one: a value parsed from a spec may have any type."""
        defaults = {name: field.default for name, field in self.__dataclass_fields__.items()}
        for name, default in defaults.items():
            kind = type(default) if name not in ("fold", "grant") else str
            value = getattr(self, name)
            if not isinstance(value, _KINDS[kind][0]) or (isinstance(value, bool) and kind is not bool):
                allowed = f" of {_RANGES[name][0]}" if name in _RANGES and kind is not str else ""
                yield f"expected {self._called(name)} to be {_KINDS[kind][1]}{allowed}, found {value!r}"
        reason: str | None = reason_against(self.fold, self.grant, self.scale)
        if reason is not None:
            yield reason
        for name, (allowed, fits) in _RANGES.items():
            if not fits(self):
                yield f"expected {self._called(name)} of {allowed}, found {getattr(self, name)}"
        for name, (what, word) in _READ_WITH.items():
            if getattr(self, what) != word and getattr(self, name) != defaults[name]:
                yield f"{name} is read with {what} {word!r} only, found {what} {getattr(self, what)!r}"
        yield from self._contradictions()

    def _contradictions(self) -> Iterator[str]:
        """Why values that are within their ranges make no sense together."""
        low, high = self._called("low"), self._called("high")
        if self.low > self.high:
            yield f"expected {low} <= {high}, found {low}={self.low} and {high}={self.high}"
        if self.grant != "round-robin" and self.fold != "all":
            if self.scale == "batch":
                yield (
                    "scale 'batch' needs grant 'round-robin', which learns each worker's first batch, or fold 'all', a mean of"
                    f" all samples, found grant {self.grant!r} and fold {self.fold!r}"
                )
            if self.tune:
                yield (
                    "batches are tuned with grant 'round-robin' or fold 'all': expected tune=false, found grant"
                    f" {self.grant!r} and fold {self.fold!r}"
                )
        if self.tune and self.fold == "all" and self.scale != "batch":
            yield f"a mean of pushes of other sizes needs scale 'batch', which weights them, found scale {self.scale!r}"
        if self.bound == "push" and not self.hard_bound:
            yield "bound=push says what hard_bound limits: expected hard_bound=true, found false"
        if self.bound == "push" and self.high < 1:
            yield "the first push leads by 1: expected high of at least 1 with bound=push, found 0"
        if self.count and self.backups:
            yield "a quorum is a count or the workers less the backups: expected one of the two"
        if self.relay and not self.groups:
            yield f"a leaf relays in a tree: expected groups of at least 1 with relay, found {self.groups}"
        if self.groups and self.grant == "next-version":
            yield "a leaf keeps pushes for a sum: groups need workers that go on meanwhile, found grant 'next-version'"
        if self.pull < 1 and self.shards == 1:
            yield f"a partial pull needs parts to choose from: expected shards of 2 to {MAX_SHARDS}, found 1"
        if self.shards > 1 and self.grant == "round-robin":
            yield f"a fixed order of grants needs one coordinator: expected shards=1, found {self.shards}"
        if self.momentum == "worker" and self.fold not in ("each", "count"):
            yield (
                f"fold {self.fold!r} makes one sequence of updates, whose momentum is the fold's: expected fold 'each' or"
                " 'count' with momentum=worker"
            )
        if self.overlap and self.waits_for_fold:
            yield (
                "a worker that waits for its version has nothing to compute meanwhile: overlap needs a grant other than"
                f" next-version and a fold other than in-order, found grant {self.grant!r} and fold {self.fold!r}"
            )
        if self.overlap and self.grant == "bounded":
            yield "weights that come in the background may be older than any bound: overlap needs another grant than 'bounded'"
        if self.overlap and self.shards > 1:
            yield f"weights come in the background for one shard: expected shards=1 with overlap, found {self.shards}"

    def check_workers(self, workers: int) -> None:
        """Raise PolicyError for numbers that are out of range for `workers` workers."""
        limits = {"backups": workers - 1, "count": workers, "divisor": workers, "groups": workers}
        name = next((name for name, most in limits.items() if getattr(self, name) > most), None)
        if name is not None:
            least = 1 if name in ("count", "divisor") else 0
            words = "fewer than the workers" if name == "backups" else "the number of workers"
            found = f"{words}, found {getattr(self, name)}"
            raise PolicyError(f"{self.spec}: expected {self._called(name)} of {least} to {limits[name]}, {found}")
        if self.fold == "count" and self.grant == "bounded":
            slots, kept = self.slots(workers), workers // self.divisor - 1
            kept += -(-workers // self.groups) - 1 if self.groups else 0
            if kept >= slots:
                raise PolicyError(
                    f"{self.spec}: the slowest of {workers} workers may fill its {slots} slots with pushes that wait for"
                    f" others, which wait for it: expected a divisor and groups with {slots - 1} of them at most, found {kept}"
                )

    def values(self, workers: int) -> Mapping[str, Any]:
        """The scheduler's values for `workers` workers. Raises PolicyError as `check_workers` does."""
        self.check_workers(workers)
        return {
            **{name: getattr(self, name) for name in _SCHEDULED},
            # So many workers are passed by at first, and still are when some have left.
            "backups": workers - self.count if self.count else self.backups,
            "timeout_ns": int(self.push_timeout * 1e9),
            "reference": float(self.reference),
            "repeats": self.pull < 1,
        }

    def slots(self, workers: int) -> int:
        """Gradient slots of a lane.

        One slot is enough for a worker that waits for the fold of its push. Otherwise the worker fills one slot while another
        is folded. Up to MOST_SLOTS serve policies under which several pushes of one worker wait to be folded.
        """
        if self.waits_for_fold and self.pull == 1:
            return 1
        if self.fold != "count" or self.waits_for_fold:
            return 2
        return min(MOST_SLOTS, max(2, workers // self.divisor + 1))

    def link_of(self, rank: int, workers: int) -> int:
        """The number of the link that carries a worker's transfers: the server's, one per leaf of a tree, or its own."""
        if self.overlap:
            return rank
        return rank * self.groups // workers if self.groups else 0

    @property
    def waits_for_fold(self) -> bool:
        """Whether a worker goes on only after its own push is folded or dropped."""
        return self.grant == "next-version" or self.fold == "in-order"

    @property
    def is_sum(self) -> bool:
        """Whether a version folds the sum or the mean of several pushes, not a single push."""
        return self.combine or self.is_mean

    @property
    def is_mean(self) -> bool:
        """Whether pushes that are folded together are divided by their number. Combined pushes are not."""
        return self.fold not in ("each", "in-order")

    @property
    def is_level(self) -> bool:
        """Whether all workers are always at the same step."""
        return self.fold == "all"

    @property
    def at_once(self) -> bool:
        """Whether a worker goes on without any wait."""
        return self.grant == "at-once"

    @property
    def needs_samples(self) -> bool:
        """Whether the scheme counts samples, so that every push must report its batch size."""
        return self.scale in ("square-root", "batch") or self.tune

    def with_options(self, text: str = "", **options: Any) -> "Policy":
        """A copy of this policy with other values, and with them in its spec: as `text`, if they were written so."""
        text = text or ",".join(f"{name}={_text(value)}" for name, value in options.items())
        return replace(self, spec=f"{self.spec},{text}", **options)


def spec_of(name: str, *numbers: object, **options: tuple[object, object]) -> str:
    """The text of a discipline with these numbers and options. An option is its value and its default, which is left out.

    >>> spec_of("r2sp", 0.8, tune=(True, False)), spec_of("asp")
    ('r2sp:0.8,tune=true', 'asp')
    """
    parts = [_text(number) for number in numbers]
    parts += [f"{key}={_text(value)}" for key, (value, default) in options.items() if value != default]
    return f"{name}:{','.join(parts)}" if parts else name


def _text(value: object) -> str:
    """The shortest text that parses to the same value: true, 0.8, 1, 0.1234567."""
    if isinstance(value, float):
        short = f"{value:g}"
        return short if float(short) == value else repr(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


_RANGES: dict[str, tuple[str, Callable[[Policy], bool]]] = {
    "low": (f"0 to {MAX_BOUND}", lambda of: 0 <= of.low <= MAX_BOUND),
    "high": (f"0 to {MAX_BOUND}", lambda of: 0 <= of.high <= MAX_BOUND),
    "release": ("release=next-push or release=printed", lambda of: of.release in ("next-push", "printed")),
    "bound": ("bound=grant or bound=push", lambda of: of.bound in ("grant", "push")),
    "credit": ("credit=listed or credit=prose", lambda of: of.credit in ("listed", "prose")),
    "count": (f"1 to {MAX_BOUND}, or 0 (the workers less the backups)", lambda of: 0 <= of.count <= MAX_BOUND),
    "backups": (f"0 to {MAX_BOUND}", lambda of: 0 <= of.backups <= MAX_BOUND),
    "push_timeout": ("0 to less than 3600 seconds", lambda of: 0 <= of.push_timeout < 3600),
    "divisor": (f"1 to {MAX_BOUND}, and to the number of workers", lambda of: (of.fold == "count") <= of.divisor <= MAX_BOUND),
    "groups": ("0 (no tree) to the number of workers", lambda of: 0 <= of.groups <= MAX_BOUND),
    "relay": ("0 (all) to 1", lambda of: 0 <= of.relay <= 1),
    "relax": ("0 to 1", lambda of: 0 <= of.relax <= 1),
    "reference": (f"1 to {MAX_BOUND} samples", lambda of: (of.scale == "square-root") <= of.reference <= MAX_BOUND),
    "pull": ("more than 0 and at most 1", lambda of: 0 < of.pull <= 1),
    "pull_timeout": ("0 to less than 3600 seconds", lambda of: 0 <= of.pull_timeout < 3600),
    "shards": (f"1 to {MAX_SHARDS}", lambda of: 1 <= of.shards <= MAX_SHARDS),
    "warm_up": (
        f"{LEAST_WARM_UP} to {MOST_WARM_UP} steps, or 0 (none)",
        lambda of: of.warm_up == 0 or LEAST_WARM_UP <= of.warm_up <= MOST_WARM_UP,
    ),
    "ema": ("0 (none) to less than 1", lambda of: 0 <= of.ema < 1),
    "clip": ("0 (not at all) or more, and finite", lambda of: 0 <= of.clip < math.inf),
    "momentum": ("momentum=fold or momentum=worker", lambda of: of.momentum in ("fold", "worker")),
}
_READ_WITH = {
    **dict.fromkeys(("low", "high", "hard_bound", "credit"), ("grant", "bounded")),
    **dict.fromkeys(("combine",), ("fold", "each")),
    # With a partial pull a worker begins steps that some shards have not granted. Other folds than a quorum, which drops what
    # is late, would lose their bounds by it.
    **dict.fromkeys(("count", "backups", "push_timeout", "pull", "pull_timeout"), ("fold", "quorum")),
    **dict.fromkeys(("divisor", "groups", "relay"), ("fold", "count")),
    "relax": ("grant", "round-robin"),
    "reference": ("scale", "square-root"),
    "warm_up": ("fold", "all"),
}
