"""The disciplines of the five papers: a table of rows, each a few values of a Policy, and the specs that name them.

Where a paper leaves a choice open, the docstring names the choice and its reason. docs/disciplines.md has a paragraph for each
row. A discipline is data, not a class. The table is the only list of disciplines: specs, advice, chaos, `fastps disciplines`,
the documentation's table and the tests read it, and the names of `__all__` are public names of fastps.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fastps.errors import PolicyError
from fastps.job.policy import DEFAULT_SHARDS, LEAST_WARM_UP, MAX_BOUND, MOST_WARM_UP, NUMBERS, Policy, spec_of

__all__ = ["ASP", "BSP", "DSSP", "PSP", "R2SP", "SSP", "BackupWorkers", "HardSync", "RudraAdv", "RudraAdvStar", "SoftSync"]


def BSP(*, tune: bool = False) -> Policy:  # noqa: N802 - the papers' names
    """Bulk synchronous parallel: fold the mean of all workers' pushes of a version, then grant to all (DSSP paper, I.A.1).

    With `tune=True` each grant carries a batch size with which all workers take equally long. Their sum stays, and a version is
    the mean of all its samples (LB-BSP; Chen, Weng, Wang, Li and Li, 2020).

    >>> BSP().spec, BSP(tune=True).spec
    ('bsp', 'bsp,tune=true')
    """
    spec = "bsp" if tune is False else f"bsp,tune={str(tune).lower()}"
    return Policy(spec=spec, fold="all", grant="next-version", scale="batch" if tune else "mean", tune=tune)


def ASP() -> Policy:  # noqa: N802
    """Asynchronous parallel: every push is folded when it arrives, and no worker waits (DSSP paper, section I.A.2)."""
    return Policy(spec="asp", fold="each", grant="at-once")


def SSP(s: int) -> Policy:  # noqa: N802
    """Stale synchronous parallel: a worker goes on while it is at most `s` pushes ahead of the slowest worker.

    The bound applies to grants, as line 8 of DSSP's Algorithm 1 tests it: the gap right after the next push may be s + 1. The
    SSP of the paper's section I.A.3, in which no gap exceeds s, is `DSSP(s, s, bound="push")`.
    Raises PolicyError unless 0 <= s <= 1,000,000.

    >>> SSP(3).spec
    'ssp:3'
    """
    return Policy(spec=spec_of("ssp", s), fold="each", grant="bounded", low=s, high=s, release="printed")


def DSSP(  # noqa: N802
    lo: int, hi: int, *, release: str = "next-push", hard_bound: bool = False, bound: str = "grant", credit: str = "listed"
) -> Policy:
    """Dynamic SSP: beyond `lo` the fastest worker gets extra steps, at most `hi - lo` at a time, as a controller predicts.

    `release` is the reading of Algorithm 1's line 17. With "next-push", the default, a waiting worker goes on at the slowest
    worker's next push, the instant that the controller predicts. With "printed" it waits until it is within `lo`. Two workers,
    one 2.6 times as slow: "next-push" has the speed of Table I (ASP's), however much times vary; "printed" has it while they
    vary by 1 % or less, and with 5 % it takes 1.3 to 1.8 times as long (SSP: 1.8).

    Neither bounds the lead: two workers whose steps take 10 and 26 ms part for as long as they run, as under ASP.
    `hard_bound=True` grants no step to a worker that leads by more than `hi`, so a push leads by at most
    `hi + 1`. `bound="push"` grants one step less: no push leads by more than `hi`, the premise of Theorem 2. Both cost the
    speed: with a worker that stays slow, all go at its pace, as under SSP.

    `credit` is the reading of line 14. "listed", the default, sends OK without taking from r*, so a worker begins r* + 1 steps.
    With "prose" it begins r* steps, as the text and Figure 2 say. With both `credit="prose"` and `release="printed"` a worker
    goes at the slowest's pace even where times are steady. `fastps reproduce dssp` measures all of this.

    Raises PolicyError unless 0 <= lo <= hi, 1 <= hi with bound="push", and each reading is one of its two.

    >>> DSSP(3, 15).spec
    'dssp:3,15'
    >>> DSSP(3, 15, release="printed", hard_bound=True).spec
    'dssp:3,15,release=printed,hard_bound=true'
    >>> DSSP(3, 15, bound="push", credit="prose").spec
    'dssp:3,15,bound=push,credit=prose'
    """
    return Policy(
        spec=spec_of(
            *("dssp", lo, hi),
            release=(release, "next-push"),
            hard_bound=(hard_bound if bound == "grant" else False, False),
            bound=(bound, "grant"),
            credit=(credit, "listed"),
        ),
        fold="each",
        grant="bounded",
        low=lo,
        high=hi,
        release=release,
        hard_bound=hard_bound or bound == "push",
        bound=bound,
        credit=credit,
    )


def Auto(steps: int = 32) -> Policy:  # noqa: N802
    """Run bsp for `steps` steps, then the discipline that `fastps advise` recommends from them. For DistributedOptimizer only.

    Raises PolicyError unless 8 <= steps <= 10,000.

    >>> Auto().spec, Auto(100).spec
    ('auto', 'auto:100')
    """
    spec = spec_of("auto") if steps == 32 else spec_of("auto", steps)
    if steps == 0:  # a policy without warm-up
        raise PolicyError(f"{spec}: expected steps of {LEAST_WARM_UP} to {MOST_WARM_UP}, found 0")
    return Policy(spec=spec, fold="all", grant="next-version", warm_up=steps)


def BackupWorkers(b: int) -> Policy:  # noqa: N802
    """Synchronous SGD with b backup workers: fold the mean of a version's first N - b gradients (Chen et al., Algorithm 4).

    A gradient of an older version is dropped and counted (line 6), and its worker continues at once with the newest weights.
    Here N counts all live workers, so that it follows those that leave and join. In the paper N counts only the workers that
    are waited for, so N + b are started.

    >>> BackupWorkers(1).spec
    'backup:1'
    """
    return Policy(spec=spec_of("backup", b), fold="quorum", grant="next-version", backups=b)


def PSP(  # noqa: N802
    push: int,
    pull: float,
    *,
    push_timeout: float = 0.0,
    pull_timeout: float = 0.0,
    shards: int = DEFAULT_SHARDS,
    scale: str = "linear",
) -> Policy:
    """PSP-SGD: partial push and partial pull, per shard (a submission to ICLR 2018, Algorithm 1).

    A shard folds `push` gradients (c) of its version and those that arrive within `push_timeout` seconds (tau1) after them. The
    learning rate is multiplied by their number (line 13); later gradients are dropped. A worker computes when a fraction `pull`
    (b%) of the shards is fresh, or up to `pull_timeout` seconds (tau2) later, with old blocks for the rest (line 4). Both
    timeouts are 0 in the paper's experiments. In the printed algorithm the timestamp of a worker is always its own iteration
    number, so the gradients of a worker that falls behind are always dropped. Here the timestamp is the oldest version among
    the blocks that came for the step. Probabilistic synchronous parallel is a different scheme of the same abbreviation.

    >>> PSP(3, 0.75).spec
    'psp:3,0.75'
    """
    timeouts = {"push_timeout": (push_timeout, 0.0), "pull_timeout": (pull_timeout, 0.0)}
    spec = spec_of("psp", push, pull, **timeouts, shards=(shards, DEFAULT_SHARDS), scale=(scale, "linear"))
    if push == 0:  # a policy that takes the pushes of all workers but the backups
        raise PolicyError(f"{spec}: expected c of 1 to {MAX_BOUND}, found 0")
    return Policy(
        spec=spec,
        fold="quorum",
        grant="next-version",
        scale=scale,
        count=push,
        push_timeout=push_timeout,
        pull=pull,
        pull_timeout=pull_timeout,
        shards=shards,
    )


def HardSync(reference_batch: int) -> Policy:  # noqa: N802
    """Rudra's hardsync: bsp with the learning rate times sqrt(lambda mu / B) (section 3.2); B is the reference model's batch.

    lambda mu is the number of samples in all pushes of a version, so every push must report its batch size.

    >>> HardSync(128).spec
    'hardsync:128'
    """
    spec = spec_of("hardsync", reference_batch)
    return Policy(spec=spec, fold="all", grant="next-version", scale="square-root", reference=reference_batch)


def SoftSync(n: int, *, scale: str = "divisor") -> Policy:  # noqa: N802
    """Rudra's n-softsync: fold the mean of floor(lambda / n) gradients of any version (equation 5); no worker waits.

    The learning rate is divided by n (equation 6). With scale="staleness" each gradient is divided by its own staleness instead
    (footnote 3). Up to MOST_SLOTS - 1 pushes of one worker may wait to be folded. A worker with more waits for a slot, as it
    would with Rudra's blocking sends.

    >>> SoftSync(2).spec
    'softsync:2'
    """
    spec = spec_of("softsync", n, scale=(scale, "divisor"))
    return Policy(spec=spec, fold="count", grant="at-once", scale=scale, divisor=n)


def RudraAdv(n: int, *, groups: int = 2, relay: float = 0.0) -> Policy:  # noqa: N802
    """Rudra-adv: n-softsync through a tree (section 3.3); a leaf passes on the gradients of its workers together.

    A leaf passes on its gradients when it holds as many as it has live workers, or as this share of them (`relay`), whichever
    workers they come from. The root counts gradients, not messages. On one node the root computes the leaves' sums in its
    single pass over memory.

    >>> RudraAdv(1).spec
    'adv:1'
    """
    spec = spec_of("adv", n, groups=(groups, 2), relay=(relay, 0.0))
    return Policy(spec=spec, fold="count", grant="at-once", scale="divisor", divisor=n, groups=groups, relay=relay)


def RudraAdvStar(n: int, *, groups: int = 2, relay: float = 0.0) -> Policy:  # noqa: N802
    """Rudra-adv*: Rudra-adv with push and pull in separate threads (section 3.3).

    A gradient is sent only after the one before was delivered. The newest weights wait in a communication buffer, and the
    worker takes them by a pointer swap.

    The learners' broadcast tree, down which weights go hop by hop, is there in `fastps simulate` only. In a job all workers
    of a machine see new weights at once. Leaves have one level below the root, as with `RudraAdv`.

    >>> RudraAdvStar(1).spec
    'adv*:1'
    """
    spec = spec_of("adv*", n, groups=(groups, 2), relay=(relay, 0.0))
    return Policy(
        spec=spec, fold="count", grant="at-once", scale="divisor", divisor=n, groups=groups, relay=relay, overlap=True
    )


def R2SP(relax: float = 0.8, *, tune: bool = False) -> Policy:  # noqa: N802
    """Round-robin synchronous parallel (Chen, Wang and Li): updates and grants in a fixed order, evenly spaced.

    A push is folded when all pushes before it in the order are folded. Its worker is granted the next step in the same order,
    at the earliest relax x T / N after the last grant, where T is the slowest worker's mean iteration time (sections III-B, V).
    With `tune=True` the grant carries a batch size with which a fast worker takes as long as the slowest (section IV), and the
    learning rate of each push is multiplied by its batch / the first batch of its worker (Algorithm 1, worker, line 5).

    >>> R2SP(0.8, tune=True).spec
    'r2sp:0.8,tune=true'
    """
    spec = spec_of("r2sp", relax, tune=(tune, False))
    return Policy(spec=spec, fold="in-order", grant="round-robin", scale="batch" if tune else "one", relax=relax, tune=tune)


@dataclass(frozen=True)
class Discipline:
    """A row of the table."""

    usage: str  # the form of the spec, options in brackets
    build: Callable[..., Policy]  # makes the policy from the spec's numbers and options
    paper: str  # where the discipline is from, with the place in the paper; "-" for none
    does: str  # what it does, one sentence, and what each of its options changes
    staleness: str  # the versions between the weights of a gradient and those that it changes, in words; N is the workers
    use: str  # when to use it, one sentence
    examples: tuple[str, ...]  # specs that show every option; tests build and schedule each for 4 workers
    # The values of the policy that are the spec's numbers, and the letters of the usage for them.
    numbers: Mapping[str, str] = field(default_factory=dict)
    defaults: int = 0  # how many trailing numbers may be omitted
    options: tuple[str, ...] = ()  # the names that may follow as name=value
    # Returns the specs that `fastps advise` tries for so many workers and such a batch; none by default.
    advised: Callable[[int, int], Sequence[str]] = lambda workers, batch: ()
    chaos: tuple[str, ...] = ()  # the specs that `fastps chaos` plays. One more changes the history of every seed.


def _divisors(workers: int) -> list[int]:
    return [n for n in (1, 2, 4, 8, 16, 32) if n < workers]


DISCIPLINES: dict[str, Discipline] = {
    "bsp": Discipline(
        "bsp[,tune=true]",
        BSP,
        paper="Zhao et al. (DSSP), section I.A.1",
        does="Each version takes one push of every live worker and folds their mean; each worker waits for the slowest.",
        staleness="0",
        use="Workers are equally fast, or results must repeat to the bit: the default. tune=true: slow ones draw less.",
        examples=("bsp", "bsp,tune=true"),
        options=("tune",),
        advised=lambda workers, batch: ["bsp", "bsp,tune=true"][: min(2, workers)],
        chaos=("bsp", "bsp,tune=true"),
    ),
    "asp": Discipline(
        "asp",
        ASP,
        paper="Zhao et al. (DSSP), section I.A.2",
        does="Each push is an update of its own; no worker waits.",
        staleness="about N - 1; no bound with a slow worker",
        use="Throughput counts most, and the step size bears stale gradients.",
        examples=("asp",),
        advised=lambda workers, batch: ["asp"],
        chaos=("asp",),
    ),
    "ssp": Discipline(
        "ssp:s",
        SSP,
        paper="Zhao et al. (DSSP), Algorithm 1",
        does="As asp, but a worker more than s pushes ahead of the slowest waits.",
        staleness="bounded",
        use="Workers slow down now and then, none for good.",
        examples=("ssp:3",),
        numbers={"low": "s", "high": "s"},
        advised=lambda workers, batch: [f"ssp:{bound}" for bound in (1, 2, 3, 5, 10)],
        chaos=("ssp:1", "ssp:3"),
    ),
    "dssp": Discipline(
        "dssp:lo,hi[,release=next-push|printed][,hard_bound=true|bound=push][,credit=listed|prose]",
        DSSP,
        paper="Zhao et al. (DSSP), Algorithms 1 and 2",
        does="As ssp:lo, but a controller grants the fastest worker up to hi - lo extra steps at a time. That bounds no lead,"
        " and costs staleness, up to asp's; release=printed bounds none either, and costs waits where times vary."
        " hard_bound=true bounds the lead after a push to hi + 1, and bound=push to hi; both cost ssp's wait for a worker that"
        " stays slow.",
        staleness="the lead is not bounded, unless by bound=push (hi) or hard_bound=true (hi + 1)",
        use="Speeds differ and change, and no single bound of ssp fits.",
        examples=(
            "dssp:3,15",
            "dssp:3,15,release=next-push",
            "dssp:3,15,release=printed",
            "dssp:3,15,hard_bound=true",
            "dssp:3,15,bound=push",
            "dssp:3,15,credit=listed",
            "dssp:3,15,credit=prose",
        ),
        numbers={"low": "lo", "high": "hi"},
        options=("release", "hard_bound", "bound", "credit"),
        advised=lambda workers, batch: ["dssp:1,4", "dssp:3,15", "dssp:5,30"],
        chaos=("dssp:1,3,hard_bound=true", "dssp:1,3,bound=push,credit=prose"),
    ),
    "backup": Discipline(
        "backup:b",
        BackupWorkers,
        paper="Chen et al. (backup workers), Algorithms 3 and 4",
        does="As bsp, but a version takes the first N - b pushes; later ones are dropped.",
        staleness="0",
        use="A few workers are slow at random, and the work of b workers may be lost.",
        examples=("backup:1",),
        numbers={"backups": "b"},
        advised=lambda workers, batch: [f"backup:{b}" for b in sorted({1, workers // 4, workers // 2} - {0, workers})],
        chaos=("backup:1",),
    ),
    "psp": Discipline(
        "psp:c,f[,shards=K][,push_timeout=S][,pull_timeout=S]",
        PSP,
        paper="PSP-SGD, Algorithm 1",
        does="A shard takes c pushes of a version (partial push); a step waits for a fraction f of the shards (partial pull).",
        staleness="0, with some stale blocks",
        use="Single messages come late on a network of many servers.",
        examples=("psp:3,0.75", "psp:3,0.75,shards=8", "psp:3,0.75,push_timeout=0.5", "psp:3,0.75,pull_timeout=0.5"),
        numbers={"count": "c", "pull": "f"},
        options=("shards", "push_timeout", "pull_timeout"),
        advised=lambda workers, batch: [f"psp:{max(1, round(0.75 * workers))},0.75", f"psp:{workers - 1},1"],
    ),
    "hardsync": Discipline(
        "hardsync:B",
        HardSync,
        paper="Gupta et al. (Rudra), section 3.2",
        does="As bsp, with the learning rate times sqrt(samples / B).",
        staleness="0",
        use="The total batch is large, and the learning rate was tuned for a batch of B.",
        examples=("hardsync:128",),
        numbers={"reference": "B"},
        advised=lambda workers, batch: [f"hardsync:{batch * workers}"],
    ),
    "softsync": Discipline(
        "softsync:n",
        SoftSync,
        paper="Gupta et al. (Rudra), equation 5",
        does="An update is the mean of N / n pushes of any version, and the rate is divided by n; no worker waits.",
        staleness="about n",
        use="A middle between updates of all workers (n = 1) and asp (n = N).",
        examples=("softsync:2",),
        numbers={"divisor": "n"},
        advised=lambda workers, batch: [f"softsync:{n}" for n in (*_divisors(workers), workers)],
        chaos=("softsync:2",),
    ),
    "adv*": Discipline(
        "adv*:n[,groups=G][,relay=f]",
        RudraAdvStar,
        paper="Gupta et al. (Rudra), section 3.3",
        does="As adv, with push and pull in threads of their own.",
        staleness="a little more than adv",
        use="The tree is to be simulated with hidden transfers.",
        examples=("adv*:1", "adv*:1,groups=3,relay=0.5"),
        numbers={"divisor": "n"},
        options=("groups", "relay"),
        advised=lambda workers, batch: [f"adv*:{n}" for n in _divisors(workers)[-1:]],
    ),
    "adv": Discipline(
        "adv:n[,groups=G][,relay=f]",
        RudraAdv,
        paper="Gupta et al. (Rudra), section 3.3",
        does="As softsync, through a tree: a leaf passes its workers' pushes on together.",
        staleness="about n",
        use="The tree of many learners is to be simulated; on one machine it saves link time only.",
        examples=("adv:1", "adv:1,groups=3,relay=0.5"),
        numbers={"divisor": "n"},
        options=("groups", "relay"),
        advised=lambda workers, batch: [f"adv:{n}" for n in _divisors(workers)[-1:]],
        chaos=("adv:2",),
    ),
    "r2sp": Discipline(
        "r2sp[:r][,tune=true]",
        R2SP,
        paper="Chen, Wang and Li (R2SP), sections III to V",
        does="Updates come one at a time in a fixed order, and grants in the same order, evenly spaced.",
        staleness="N - 1",
        use="All workers share one link that bsp fills in bursts; tune=true evens out their speeds with batch sizes.",
        examples=("r2sp", "r2sp:0.5", "r2sp,tune=true", "r2sp:0.5,tune=true"),
        numbers={"relax": "r"},
        defaults=1,
        options=("tune",),
        advised=lambda workers, batch: ["r2sp:0.5", "r2sp:0.8", "r2sp:1", "r2sp:0.8,tune=true"],
        chaos=("r2sp:0.8",),
    ),
    "auto": Discipline(
        "auto[:steps]",
        Auto,
        paper="-",
        does="Trains under bsp for 32 steps, or as many as you say, and then under what fastps advise recommends of the"
        " disciplines that keep bsp's learning rate: bsp, or backup:b.",
        staleness="that of the choice",
        use="You do not know which to take.",
        examples=("auto", "auto:100"),
        numbers={"warm_up": "steps"},
        defaults=1,
    ),
    "policy": Discipline(
        "policy:fold=F,grant=G,...",
        Policy,
        paper="-",
        does="Any combination of the parts of fastps.Policy that makes sense.",
        staleness="that of its parts",
        use="None of the others is what you want.",
        examples=(
            "policy:fold=all,grant=next-version,warm_up=20",
            "policy:fold=each,grant=at-once",
            "policy:fold=count,grant=bounded,low=3,high=3,divisor=2",
        ),
        options=tuple(name for name in Policy.__dataclass_fields__ if name != "spec"),
        # Timers are in simulated time, in which a push takes some tens of microseconds.
        chaos=(
            "policy:fold=quorum,grant=next-version,count=2,push_timeout=0.00002,scale=mean",
            "policy:fold=quorum,grant=next-version,count=2,push_timeout=0.00002,scale=mean,pull=0.5,shards=2",
            "policy:fold=each,grant=bounded,low=2,high=2,release=printed",
            "policy:fold=count,grant=next-version,divisor=2,scale=mean",
            "policy:fold=count,grant=at-once,divisor=1,scale=mean",
        ),
    ),
}
NUMBERS.update({name: row.numbers for name, row in DISCIPLINES.items()})
