"""Specs: what is read, what is refused and with which sentence, how lists are split, and that what is written is read again."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastps
from fastps.job.disciplines import DISCIPLINES
from fastps.job.specs import MODIFIERS
from fastps.kernels.scheduling.scheduler import Scheduler


@pytest.mark.parametrize(("spec", "policy"), [
    ("bsp", fastps.BSP()),
    (" ASP ", fastps.ASP()),
    ("ssp:3", fastps.SSP(3)),
    ("ssp:0", fastps.SSP(0)),
    ("dssp:3,15", fastps.DSSP(3, 15)),
    ("dssp:3, 15, release=printed", fastps.DSSP(3, 15, release="printed")),
    ("dssp:3,15,hard_bound=true", fastps.DSSP(3, 15, hard_bound=True)),
    ("dssp:3,15,bound=push", fastps.DSSP(3, 15, bound="push")),
    ("dssp:3,15,hard_bound=true,bound=push", fastps.DSSP(3, 15, bound="push")),
    ("dssp:3,15,release=printed,credit=prose", fastps.DSSP(3, 15, release="printed", credit="prose")),
    ("asp,combine=true", replace(fastps.ASP(), spec="asp,combine=true", combine=True)),
    ("asp:combine=true", replace(fastps.ASP(), spec="asp,combine=true", combine=True)),
])  # fmt: skip
def test_specs_are_read(spec: str, policy: fastps.Policy) -> None:
    assert fastps.parse_policy(spec) == policy
    assert fastps.parse_policy(policy.spec) == policy
    assert fastps.parse_policy(policy) is policy


@pytest.mark.parametrize("spec", ["foo", ""])
def test_an_unknown_discipline_is_refused_with_the_known_ones(spec: str) -> None:
    with pytest.raises(fastps.PolicyError, match=r"expected one of bsp\[,tune=true\], asp, ssp:s"):
        fastps.parse_policy(spec)


def test_a_comma_begins_a_new_spec_only_before_a_name() -> None:
    policies = fastps.parse_policies("bsp,ASP,ssp:3,dssp:3,15,release=printed,DSSP:3,15")
    assert [policy.spec for policy in policies] == ["bsp", "asp", "ssp:3", "dssp:3,15,release=printed", "dssp:3,15"]


SENSIBLE = {
    "each": {"at-once", "bounded", "round-robin"},
    "all": {"next-version"},
    "quorum": {"next-version"},
    "count": {"at-once", "bounded", "round-robin", "next-version"},
    "in-order": {"round-robin"},
}
GRANTS = ("at-once", "next-version", "bounded", "round-robin")
SINGLE, SUMS = ("one", "staleness", "batch"), ("mean", "linear", "square-root", "divisor", "staleness")
SCALES = (*SUMS, "one", "batch")
GRANT_REASONS = {
    "each": "every push makes a version by itself, so there is none to wait for: use grant 'at-once'",
    "all": "a sum of all workers needs workers that wait for it: use grant 'next-version'",
    "quorum": "pushes of one version need workers that wait for the next: use grant 'next-version'",
    "in-order": "pushes in a fixed order need grants in that order: use grant 'round-robin'",
}

# Each: the spec, and the sentence that refuses it, without the spec if it begins with that.
REFUSED = {
    "ssp": "'ssp': expected ssp:s, found no numbers",
    "ssp:1,2": "'ssp:1,2': expected ssp:s, found 1, 2",
    "bsp:1": "'bsp:1': expected bsp[,tune=true], found 1",
    "ssp:99999999": "expected s of 0 to 1000000, found 99999999",
    "dssp:9,3": "expected lo <= hi, found lo=9 and hi=3",
    "dssp:3,15,release=never": "expected release of release=next-push or release=printed, found never",
    "ssp:-1": "expected s of 0 to 1000000, found -1",
    "dssp:-1,3": "expected lo of 0 to 1000000, found -1",
    "backup:-1": "expected b of 0 to 1000000, found -1",
    "psp:0,0.5": "expected c of 1 to 1000000, found 0",
    "psp:3,0": "expected f of more than 0 and at most 1, found 0",
    "psp:3,1.5": "expected f of more than 0 and at most 1, found 1.5",
    "psp:3,nan": "expected f of more than 0 and at most 1, found nan",
    "psp:3,1,push_timeout=-1": "expected push_timeout of 0 to less than 3600 seconds, found -1",
    "psp:3,1,pull_timeout=3600": "expected pull_timeout of 0 to less than 3600 seconds, found 3600",
    "psp:3,1,shards=2.5": "expected shards to be a whole number of 1 to 64, found 2.5",
    "psp:3,0.5,shards=1": "a partial pull needs parts to choose from: expected shards of 2 to 64, found 1",
    "psp:3": "'psp:3': expected psp:c,f[,shards=K][,push_timeout=S][,pull_timeout=S], found 3",
    "psp:1.5,0.5": "expected c to be a whole number of 1 to 1000000, or 0 (the workers less the backups), found 1.5",
    "psp:3,x": "expected f to be a number of more than 0 and at most 1, found 'x'",
    "hardsync:0": "expected B of 1 to 1000000 samples, found 0",
    "psp:3,0.5,stagger=x": "expected relax to be a number of 0 to 1, found 'x'",
    "auto:3": "expected steps of 8 to 10000 steps, or 0 (none), found 3",
    "auto:0": "expected steps of 8 to 10000, found 0",
    "softsync:0": "expected n of 1 to 1000000, and to the number of workers, found 0",
    "softsync:1.5": "expected n to be a whole number of 1 to 1000000, and to the number of workers, found 1.5",
    "adv:1,groups=-1": "expected groups of 0 (no tree) to the number of workers, found -1",
    "r2sp:1.1": "expected r of 0 to 1, found 1.1",
    "r2sp:-0.1": "expected r of 0 to 1, found -0.1",
    "r2sp,tune=yes": "r2sp:0.8,tune=yes: expected tune to be true or false, found 'yes'",
    "dssp:3,15,bound=lead": "expected bound of bound=grant or bound=push, found lead",
    "dssp:3,15,credit=both": "expected credit of credit=listed or credit=prose, found both",
    "dssp:0,0,bound=push": "the first push leads by 1: expected high of at least 1 with bound=push, found 0",
    "ssp:3,bound=push": (
        "'ssp:3,bound=push': expected ssp:s with the options scale, pull, pull_timeout, shards, stagger, ema, clip, combine,"
        " momentum, found the option 'bound'"
    ),
    "policy:fold=each,grant=bounded,low=1,high=3,bound=push": (
        "bound=push says what hard_bound limits: expected hard_bound=true, found false"
    ),
    "policy:fold=each,grant=at-once,credit=prose": "credit is read with grant 'bounded' only, found grant 'at-once'",
    "dssp:3,15,hard_bound=2": "expected hard_bound to be true or false, found 2",
    "ssp:x": "expected s to be a whole number of 0 to 1000000, found 'x'",
    "ssp:3,shards=0": "expected shards of 1 to 64, found 0",
    "ssp:3,shards=65": "expected shards of 1 to 64, found 65",
    "ssp:3,shards=x": "expected shards to be a whole number of 1 to 64, found 'x'",
    "backup:1,pull=0": "expected pull of more than 0 and at most 1, found 0",
    "ssp:3,pull=0.75": "pull is read with fold 'quorum' only, found fold 'each'",
    "bsp,pull_timeout=1": "pull_timeout is read with fold 'quorum' only, found fold 'all'",
    "policy:fold=each,grant=bounded,low=1,high=1,overlap=true": (
        "weights that come in the background may be older than any bound: overlap needs another grant than 'bounded'"
    ),
    "adv*:1,shards=2": "weights come in the background for one shard: expected shards=1 with overlap, found 2",
    "r2sp,shards=4": "r2sp:0.8,shards=4: a fixed order of grants needs one coordinator: expected shards=1, found 4",
    "asp,stagger=2": "expected relax of 0 to 1, found 2",
    "ssp:3,stagger=0.5": "low is read with grant 'bounded' only, found grant 'round-robin'",
    "asp,ema=1": "expected ema of 0 (none) to less than 1, found 1",
    "asp,ema=0.5,ema=0.6": "'asp,ema=0.5,ema=0.6': expected each option once, found one of ema again",
    "asp,clip=-1": "expected clip of 0 (not at all) or more, and finite, found -1",
    "asp,clip=inf": "expected clip of 0 (not at all) or more, and finite, found inf",
    "bsp,scale=sqrt": "expected reference of 1 to 1000000 samples, found 0",
    "hardsync:8,scale=mean": "reference is read with scale 'square-root' only, found scale 'mean'",
    "asp,scale=batch": (
        "scale 'batch' needs grant 'round-robin', which learns each worker's first batch, or fold 'all', a mean of all samples,"
        " found grant 'at-once' and fold 'each'"
    ),
    "bsp,tune=true,scale=mean": "a mean of pushes of other sizes needs scale 'batch', which weights them, found scale 'mean'",
    "bsp,tune=yes": "bsp,tune=yes: expected tune to be true or false, found 'yes'",
    "asp,tune=true": (
        "'asp,tune=true': expected asp with the options scale, pull, pull_timeout, shards, stagger, ema, clip, combine,"
        " momentum, found the option 'tune'"
    ),
    "adv:1,relay=2": "expected relay of 0 (all) to 1, found 2",
    "adv:1,groups=0,relay=0.5": "a leaf relays in a tree: expected groups of at least 1 with relay, found 0",
    "r2sp,groups=2": (
        "'r2sp,groups=2': expected r2sp[:r][,tune=true] with the options tune, scale, pull, pull_timeout, shards, stagger,"
        " ema, clip, combine, momentum, found the option 'groups'"
    ),
    "bsp,combine=true": "combine is read with fold 'each' only, found fold 'all'",
    "r2sp,combine=true": "r2sp:0.8,combine=true: combine is read with fold 'each' only, found fold 'in-order'",
    "asp,combine=yes": "expected combine to be true or false, found 'yes'",
    "asp,scale=mean,combine=true": (
        "scale 'mean' cannot go with fold 'each': it is of pushes that are folded together; use 'one', 'staleness' or 'batch'"
    ),
    "policy:fold=each": "'policy:fold=each': expected policy:fold=F,grant=G,...; some of it is missing or of the wrong kind",
    "policy:fold=some,grant=at-once": "expected fold to be one of each, all, quorum, count, in-order, found 'some'",
    "policy:fold=each,grant=never": "expected grant to be one of at-once, next-version, bounded, round-robin, found 'never'",
    "policy:fold=each,grant=bounded,low=3": "expected low <= high, found low=3 and high=0",
    "policy:fold=each,grant=bounded,low=1.5,high=3": "expected low to be a whole number of 0 to 1000000, found 1.5",
    "policy:fold=count,grant=at-once": "expected divisor of 1 to 1000000, and to the number of workers, found 0",
    "policy:fold=each,grant=at-once,count=2": "count is read with fold 'quorum' only, found fold 'each'",
    "policy:fold=all,grant=next-version,groups=2": "groups is read with fold 'count' only, found fold 'all'",
    "policy:fold=count,grant=next-version,divisor=1,groups=2": (
        "a leaf keeps pushes for a sum: groups need workers that go on meanwhile, found grant 'next-version'"
    ),
    "policy:fold=each,grant=at-once,tune=true": (
        "batches are tuned with grant 'round-robin' or fold 'all': expected tune=false, found grant 'at-once' and fold 'each'"
    ),
    "policy:fold=quorum,grant=next-version,count=2,backups=1": (
        "a quorum is a count or the workers less the backups: expected one of the two"
    ),
    "policy:fold=all,grant=next-version,overlap=true": (
        "a worker that waits for its version has nothing to compute meanwhile: overlap needs a grant other than next-version"
        " and a fold other than in-order, found grant 'next-version' and fold 'all'"
    ),
    "policy:fold=in-order,grant=round-robin,overlap=true": (
        "a worker that waits for its version has nothing to compute meanwhile: overlap needs a grant other than next-version"
        " and a fold other than in-order, found grant 'round-robin' and fold 'in-order'"
    ),
}


@pytest.mark.parametrize("spec", REFUSED)
def test_what_is_refused_is_refused_in_one_sentence_with_what_is_allowed(spec: str) -> None:
    with pytest.raises(fastps.PolicyError) as caught:
        fastps.parse_policy(spec)
    assert str(caught.value) in (REFUSED[spec], f"{spec}: {REFUSED[spec]}") and isinstance(caught.value, fastps.Error)


@pytest.mark.parametrize(("spec", "workers", "sentence"), [
    ("psp:5,0.5", 4, "psp:5,0.5: expected c of 1 to 4, the number of workers, found 5"),
    ("backup:4", 4, "backup:4: expected b of 0 to 3, fewer than the workers, found 4"),
    ("backup:5", 4, "backup:5: expected b of 0 to 3, fewer than the workers, found 5"),
    ("softsync:5", 4, "softsync:5: expected n of 1 to 4, the number of workers, found 5"),
    (
        "policy:fold=count,grant=bounded,low=1,high=1,divisor=1",
        8,
        "policy:fold=count,grant=bounded,low=1,high=1,divisor=1: the slowest of 8 workers may fill its 4 slots with"
        " pushes that wait for others, which wait for it: expected a divisor and groups with 3 of them at most, found 7",
    ),
    ("adv:1,groups=5", 4, "adv:1,groups=5: expected groups of 0 to 4, the number of workers, found 5"),
    ("adv*:2", 1, "adv*:2: expected n of 1 to 1, the number of workers, found 2"),
])  # fmt: skip
def test_numbers_that_do_not_fit_the_workers_are_refused(spec: str, workers: int, sentence: str) -> None:
    policy = fastps.parse_policy(spec)
    for use in (policy.check_workers, policy.values):
        with pytest.raises(fastps.PolicyError) as caught:
            use(workers)
        assert str(caught.value) == sentence


def _numbers_of(fold: str, grant: str, scale: str) -> dict[str, Any]:
    """The numbers without which such a policy is incomplete."""
    numbers: dict[str, Any] = {"low": 1, "high": 2} if grant == "bounded" else {}
    return numbers | ({"divisor": 1} if fold == "count" else {}) | ({"reference": 8} if scale == "square-root" else {})


def _reason_against(fold: str, grant: str, scale: str) -> str | None:
    """Written out once more: what of the combination makes no sense."""
    if grant not in SENSIBLE[fold]:
        return f"fold '{fold}' cannot go with grant '{grant}': {GRANT_REASONS[fold]}"
    if fold in ("each", "in-order") and scale not in SINGLE:
        return (
            f"scale '{scale}' cannot go with fold '{fold}': it is of pushes that are folded together; use 'one', 'staleness' or"
        )
    if fold not in ("each", "in-order") and scale not in (*SUMS, *(["batch"] if fold == "all" else [])):
        return f"scale '{scale}' cannot go with fold '{fold}': pushes that are folded together need a mean; use one of"
    if scale == "divisor" and fold != "count":
        return "scale 'divisor' needs fold 'count', whose divisor it is"
    if scale == "batch" and grant != "round-robin" and fold != "all":
        return "scale 'batch' needs grant 'round-robin', which learns each worker's first batch, or fold 'all', a mean of all"
    return None


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("grant", GRANTS)
@pytest.mark.parametrize("fold", SENSIBLE)
def test_every_combination_works_or_says_why_not(fold: str, grant: str, scale: str) -> None:
    reason = _reason_against(fold, grant, scale)
    values = {"fold": fold, "grant": grant, "scale": scale, **_numbers_of(fold, grant, scale)}
    if reason is None:
        policy = fastps.Policy(**values)
        assert fastps.parse_policy(policy.spec) == policy
        Scheduler(4, **policy.values(4))
        return
    with pytest.raises(fastps.PolicyError) as caught:
        fastps.Policy(**values)
    assert f": {reason}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_modifiers_mean_the_same_in_any_order() -> None:
    one, other = fastps.parse_policy("backup:1,shards=8,pull=0.5"), fastps.parse_policy("backup:1,pull=0.5,shards=8")
    assert replace(one, spec="x") == replace(other, spec="x")
    assert fastps.parse_policy("asp,scale=batch,stagger=0.5").scale == "batch"


# -- what is written is read again -------------------------------------------------------------------

_small = st.integers(0, 99)
_from_1 = st.integers(1, 99)
_share = st.floats(0, 1)
_fraction = st.floats(0, 1, exclude_min=True)
_seconds = st.floats(0, 3600, exclude_max=True)
_bounds = st.tuples(_small, _small).map(lambda pair: (min(pair), max(pair)))
_named = {
    "bsp": st.builds(fastps.BSP),
    "asp": st.builds(fastps.ASP),
    "ssp": st.builds(fastps.SSP, _small),
    "dssp": st.builds(
        lambda bounds, release, limit, credit: fastps.DSSP(
            *bounds, release=release, credit=credit, **(limit if bounds[1] else {})
        ),
        _bounds,
        st.sampled_from(["next-push", "printed"]),
        st.sampled_from([{}, {"hard_bound": True}, {"bound": "push"}]),
        st.sampled_from(["listed", "prose"]),
    ),
    "backup": st.builds(fastps.BackupWorkers, _small),
    "psp": st.builds(
        fastps.PSP,
        _from_1,
        _fraction,
        push_timeout=_seconds,
        pull_timeout=_seconds,
        shards=st.integers(2, 64),
        scale=st.sampled_from(["linear", "mean", "staleness"]),
    ),
    "hardsync": st.builds(fastps.HardSync, _from_1),
    "softsync": st.builds(fastps.SoftSync, _from_1, scale=st.sampled_from(["divisor", "staleness", "mean"])),
    "adv": st.builds(fastps.RudraAdv, _from_1, groups=_from_1, relay=_share),
    "adv*": st.builds(fastps.RudraAdvStar, _from_1, groups=_small),
    "r2sp": st.builds(fastps.R2SP, _share, tune=st.booleans()),
}


@st.composite
def _policies_of_values(draw: st.DrawFn) -> fastps.Policy:
    """A policy of any combination that makes sense, with random numbers where they are read."""
    combinations = ((fold, grant, scale) for fold in SENSIBLE for grant in sorted(SENSIBLE[fold]) for scale in SCALES)
    fold, grant, scale = draw(st.sampled_from([each for each in combinations if _reason_against(*each) is None]))
    values: dict[str, Any] = {"ema": draw(st.floats(0, 1, exclude_max=True)), "clip": draw(st.floats(0, 1e9))}
    if grant == "bounded":
        values["low"], values["high"] = draw(_bounds)
        values |= {"release": draw(st.sampled_from(["next-push", "printed"])), "hard_bound": draw(st.booleans())}
        values |= {"credit": draw(st.sampled_from(["listed", "prose"]))}
        if values["hard_bound"] and values["high"] > 0:
            values["bound"] = draw(st.sampled_from(["grant", "push"]))
    if grant == "round-robin":
        values |= {"relax": draw(_share), "tune": draw(st.booleans())}
    else:
        values["shards"] = draw(st.integers(1, 64))
    if fold == "each":
        values["combine"] = draw(st.booleans())
    if fold == "quorum":
        values |= {draw(st.sampled_from(["count", "backups"])): draw(_small), "push_timeout": draw(_seconds)}
        values |= {"pull_timeout": draw(_seconds)} | ({"pull": draw(_fraction)} if values["shards"] > 1 else {})
    if fold == "count":
        values |= {"divisor": draw(_from_1), "groups": 0 if grant == "next-version" else draw(_small)}
        values["relay"] = draw(_share) if values["groups"] else 0.0
        values["overlap"] = grant in ("at-once", "round-robin") and values.get("shards", 1) == 1 and draw(st.booleans())
    if scale == "square-root":
        values["reference"] = draw(_from_1)
    return fastps.Policy(fold=fold, grant=grant, scale=scale, **values)


@st.composite
def _policies(draw: st.DrawFn) -> fastps.Policy:
    """Any policy, with a random choice of the modifiers that go with it, in random order."""
    policy = draw(st.one_of(*_named.values(), _policies_of_values()))
    modifiers: dict[str, Any] = {"ema": draw(st.floats(0, 1, exclude_max=True)), "clip": draw(st.floats(0, 1e9))}
    if policy.grant in ("next-version", "bounded"):
        modifiers["shards"] = draw(st.integers(2, 64))
    if policy.fold == "quorum":
        modifiers |= {"pull": draw(_fraction), "pull_timeout": draw(_seconds)}
    if policy.grant == "at-once" and policy.shards == 1:
        modifiers["stagger"] = draw(_share)
    if policy.fold == "each" and not policy.combine:
        modifiers["combine"] = draw(st.sampled_from(["true", "false"]))
    if policy.scale != "square-root":
        single = policy.fold in ("each", "in-order")
        modifiers["scale"] = draw(st.sampled_from(["1/sigma", "one"] if single else ["1/sigma", "mean", "linear"]))
    own = policy.spec.startswith("policy:")  # its options have some of the modifiers' names
    names = [
        name
        for name in modifiers
        if f",{name}=" not in policy.spec and not (own and name in fastps.Policy.__dataclass_fields__)
    ]
    chosen = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    return fastps.parse_policy(",".join([policy.spec, *(f"{name}={modifiers[name]}" for name in chosen)]))


@pytest.mark.parametrize("name", [*_named, "policy"])
@pytest.mark.sampled(3)
def test_a_policys_spec_reads_as_the_policy(name: str) -> None:
    @settings(max_examples=60 if name in _named else 200, deadline=None)
    @given(_named.get(name, _policies_of_values()))
    def check(policy: fastps.Policy) -> None:
        assert policy.spec.partition(":")[0] == name
        assert fastps.parse_policy(policy.spec) == policy

    check()


@settings(max_examples=200, deadline=None)
@given(st.lists(_policies(), min_size=1, max_size=6))
def test_lists_of_specs_with_modifiers_read_as_their_policies(policies: list[fastps.Policy]) -> None:
    for policy in policies:
        assert fastps.parse_policy(policy.spec) == policy
    assert fastps.parse_policies(", ".join(policy.spec for policy in policies)) == policies


# Each modifier in use; a discipline's own options are in its row's examples.
MODIFIED = {
    "scale": ["ssp:3,scale=1/sigma", "softsync:2,scale=1/n", "softsync:2,scale=mean", "bsp,scale=linear", "asp,scale=one"],
    "pull": ["backup:1,pull=0.75"],
    "pull_timeout": ["backup:1,pull=0.75,pull_timeout=0.5"],
    "shards": ["asp,shards=4"],
    "stagger": ["softsync:2,stagger=0.8", "asp,stagger=0"],
    "ema": ["bsp,ema=0.999"],
    "clip": ["bsp,clip=1"],
    "combine": ["asp,combine=true", "dssp:3,15,scale=1/sigma,combine=true"],
    "momentum": ["asp,momentum=worker", "softsync:2,momentum=worker", "ssp:3,momentum=worker"],
}


@pytest.mark.parametrize(("name", "usage", "specs"), [
    *((name, row.usage, list(row.examples)) for name, row in DISCIPLINES.items()),
    *((name, usage, MODIFIED.get(name, [])) for name, usage in MODIFIERS.items()),
])  # fmt: skip
def test_every_usage_string_is_in_use(name: str, usage: str, specs: list[str]) -> None:
    text = " ".join(specs)
    words = re.findall(r"(\w+)=", usage) + re.findall(r"[\w/-]+(?=\|)|(?<=\|)[\w/-]+", usage)
    assert specs
    assert [word for word in words if word not in text] == []
    for spec in specs:
        policy = fastps.parse_policy(spec)
        assert fastps.parse_policy(policy.spec) == policy
        Scheduler(4, **policy.values(4))


@pytest.mark.parametrize(
    ("spec", "links"), [("bsp", [0, 0, 0, 0]), ("adv:1", [0, 0, 1, 1]), ("adv*:1", [0, 1, 2, 3])], ids=["server", "tree", "own"]
)
def test_workers_share_the_links_of_their_discipline(spec: str, links: list[int]) -> None:
    assert [fastps.parse_policy(spec).link_of(rank, 4) for rank in range(4)] == links
