"""The disciplines of the five papers: rows of one table, each a few values of a Policy, and the specs that name them.

Where a paper leaves room, the docstring says what was chosen and why; docs/disciplines.md has a paragraph a row. Refuses to
decide anything, and to have a class per discipline.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastps.errors import PolicyError
from fastps.job.policy import DEFAULT_SHARDS, LEAST_WARM_UP, MAX_BOUND, Policy


def BSP() -> Policy:  # noqa: N802 - the papers' names
    """Bulk synchronous parallel: all workers of a version, their mean, then all go on (DSSP paper, section I.A.1).

    >>> BSP().spec
    'bsp'
    """
    return Policy(spec="bsp", fold="all", grant="next-version")


def ASP() -> Policy:  # noqa: N802
    """Asynchronous parallel: every push is folded when it arrives, nobody waits (DSSP paper, section I.A.2)."""
    return Policy(spec="asp", fold="each", grant="at-once")


def SSP(s: int) -> Policy:  # noqa: N802
    """Stale synchronous parallel: a worker goes on while it is not more than `s` pushes ahead of the slowest.

    The bound is on grants, as line 8 of DSSP's Algorithm 1 tests it: the gap just after the next push may be s + 1.
    Raises PolicyError unless 0 <= s <= 1,000,000.

    >>> SSP(3).spec
    'ssp:3'
    """
    _check("ssp", "s", s, 0)
    return Policy(spec=f"ssp:{s}", fold="each", grant="bounded", low=s, high=s, release="printed")


def DSSP(lo: int, hi: int, *, release: str = "next-push", hard_bound: bool = False) -> Policy:  # noqa: N802
    """Dynamic SSP: beyond `lo` the fastest worker gets as many extra steps, up to `hi - lo`, as the controller predicts.

    Algorithm 1's line 17 has two readings. As "printed", a worker without credit waits until it is within `lo` again.
    With "next-push" it is released at the slowest worker's next push, the instant whose wait the controller minimizes; this
    is the default, for it alone always gives Table I's throughput (DSSP as fast as ASP, SSP half as fast). With two workers of
    speeds 3.1 : 1 and dssp:3,15 (tests/kernels/scheduling/test_scheduler.py), next-push does ASP's 1.32 steps per unit; printed
    does anything from SSP's 0.65 to ASP's 1.32, depending on range, phase and jitter. In neither reading is the gap bounded by
    `hi`; `hard_bound=True` caps the credit so that no worker is granted a step while more than `hi` ahead, which Theorem 2
    needs, and costs the speed (0.65). As printed (line 14), r* = 3 lets a worker begin four steps; this is kept.

    Raises PolicyError unless 0 <= lo <= hi and release is one of the two.

    >>> DSSP(3, 15).spec
    'dssp:3,15'
    >>> DSSP(3, 15, release="printed", hard_bound=True).spec
    'dssp:3,15,release=printed,hard_bound=true'
    """
    _check("dssp", "lo", lo, 0)
    _check("dssp", "hi", hi, 0)
    if hi < lo:
        raise PolicyError(f"dssp:{lo},{hi}: expected lo <= hi, found lo={lo} and hi={hi}; write dssp:{hi},{lo}?")
    spec = f"dssp:{lo},{hi}"
    spec += "" if release == "next-push" else f",release={release}"
    spec += ",hard_bound=true" if hard_bound else ""
    return Policy(spec=spec, fold="each", grant="bounded", low=lo, high=hi, release=release, hard_bound=hard_bound)


def Auto(steps: int = 32) -> Policy:  # noqa: N802
    """bsp for so many steps, then what `fastps advise` recommends for them (fastps/advice/auto_sync.py). For
    DistributedOptimizer.

    Raises PolicyError unless 8 <= steps <= 10,000.

    >>> Auto().spec, Auto(100).spec
    ('auto', 'auto:100')
    """
    _check("auto", "steps", steps, LEAST_WARM_UP)
    return Policy(spec="auto" if steps == 32 else f"auto:{steps}", fold="all", grant="next-version", warm_up=steps)


def BackupWorkers(b: int) -> Policy:  # noqa: N802
    """Synchronous SGD with b backup workers: the first N - b gradients of a version, their mean (Chen et al., Algorithm 4).

    A gradient of an older version is dropped and counted (line 6), and its worker goes on with the newest weights at once.
    N counts all workers here; in the paper it is those that are waited for, so that N + b are started.

    >>> BackupWorkers(1).spec
    'backup:1'
    """
    _check("backup", "b", b, 0)
    return Policy(spec=f"backup:{b}", fold="quorum", grant="next-version", backups=b)


def PSP(  # noqa: N802
    push: int,
    pull: float,
    *,
    push_timeout: float = 0.0,
    pull_timeout: float = 0.0,
    shards: int = DEFAULT_SHARDS,
    scale: str = "linear",
) -> Policy:
    """PSP-SGD: partial push and partial pull, per shard (Partially Synchronous Parallelism SGD, ICLR 2018, Algorithm 1).

    A shard folds `push` gradients (c) of its version and those that come within `push_timeout` seconds (tau1) after, with the
    learning rate times their number (line 13); later ones are dropped. A worker computes when a fraction `pull` (b%) of the
    shards is fresh, or up to `pull_timeout` seconds (tau2) later, with old blocks for the rest (line 4). Both timeouts are
    0 in the paper's experiments. As printed a worker's own iteration number is its timestamp for ever, so that one that falls
    behind is dropped for ever; here it is the newest version that it has pulled. This is not probabilistic synchronous
    parallel, which is called PSP, too.

    >>> PSP(3, 0.75).spec
    'psp:3,0.75'
    """
    spec = f"psp:{push},{_number(pull)}"
    options = {"push_timeout": (push_timeout, 0.0), "pull_timeout": (pull_timeout, 0.0), "shards": (shards, DEFAULT_SHARDS)}
    spec += "".join(f",{name}={_number(value)}" for name, (value, default) in options.items() if value != default)
    spec += "" if scale == "linear" else f",scale={scale}"
    _check("psp", "c", push, 1)
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
    """Rudra's hardsync: bsp with the learning rate times sqrt(lambda mu / B) (section 3.2), B the reference model's batch.

    lambda mu is the samples of all pushes of a version, so every push must tell its batch.

    >>> HardSync(128).spec
    'hardsync:128'
    """
    _check("hardsync", "B", reference_batch, 1)
    return Policy(
        spec=f"hardsync:{reference_batch}", fold="all", grant="next-version", scale="square-root", reference=reference_batch
    )


def SoftSync(n: int, *, scale: str = "divisor") -> Policy:  # noqa: N802
    """Rudra's n-softsync: floor(lambda / n) gradients of any version, their mean (equation 5); nobody waits.

    The learning rate is divided by n (equation 6), or with scale="staleness" each gradient by its own staleness (footnote 3).
    Up to MOST_SLOTS - 1 pushes of one worker may wait to be folded; a worker with more in hand waits for a slot, as Rudra's
    blocking sends would make it.

    >>> SoftSync(2).spec
    'softsync:2'
    """
    _check("softsync", "n", n, 1)
    return Policy(
        spec=f"softsync:{n}" + ("" if scale == "divisor" else f",scale={scale}"),
        fold="count",
        grant="at-once",
        scale=scale,
        divisor=n,
    )


def RudraAdv(n: int, *, groups: int = 2) -> Policy:  # noqa: N802
    """Rudra-adv: n-softsync through a tree (section 3.3): a leaf passes its workers' gradients on together.

    A leaf has passed on when it holds one gradient for each of its live workers, of whichever of them; the root counts
    gradients, not messages. On one node the leaf's sum is made in the root's one pass over memory.

    >>> RudraAdv(1).spec
    'adv:1'
    """
    _check("adv", "n", n, 1)
    spec = f"adv:{n}" + ("" if groups == 2 else f",groups={groups}")
    return Policy(spec=spec, fold="count", grant="at-once", scale="divisor", divisor=n, groups=groups)


def RudraAdvStar(n: int, *, groups: int = 2) -> Policy:  # noqa: N802
    """Rudra-adv*: Rudra-adv with push and pull in threads of their own (section 3.3).

    The next gradient is never sent before the last was delivered; the newest weights wait in a communication buffer and are
    taken by a pointer swap.

    >>> RudraAdvStar(1).spec
    'adv*:1'
    """
    _check("adv*", "n", n, 1)
    spec = f"adv*:{n}" + ("" if groups == 2 else f",groups={groups}")
    return Policy(spec=spec, fold="count", grant="at-once", scale="divisor", divisor=n, groups=groups, overlap=True)


def R2SP(relax: float = 0.8, *, tune: bool = False) -> Policy:  # noqa: N802
    """Round-robin synchronous parallel (Chen, Wang and Li): updates and permissions in a fixed order, evenly spaced.

    A push is folded when all before it in the order are; its worker may go on in its turn, at the earliest relax x T / N
    after the last permission, with T the slowest worker's mean iteration time (section III-B, V). With `tune=True` the
    permission carries a batch with which a fast worker takes as long as the slowest (section IV), and each push's learning rate
    is scaled by its batch / its worker's first (Algorithm 1, worker, line 5).

    >>> R2SP(0.8, tune=True).spec
    'r2sp:0.8,tune=true'
    """
    spec = f"r2sp:{_number(relax)}" + (",tune=true" if tune else "")
    return Policy(spec=spec, fold="in-order", grant="round-robin", scale="batch" if tune else "one", relax=relax, tune=tune)


def _check(name: str, what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or not least <= value <= MAX_BOUND:
        raise PolicyError(f"{name}: expected {what} from {least} to {MAX_BOUND}, a whole number, found {value}")


def _number(value: object) -> str:
    """The shortest text that reads as the same number: 0.8, 1, 0.1234567."""
    if not isinstance(value, float | int):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


@dataclass(frozen=True)
class Discipline:
    """A row of the table: how the spec is written, what makes the policy of its arguments, and what a user should know."""

    usage: str
    build: Callable[..., Policy]
    paper: str
    does: str
    use: str
    numbers: tuple[type, ...] = ()
    defaults: int = 0  # how many of the numbers may be left out, from the end
    options: tuple[str, ...] = ()


DISCIPLINES: dict[str, Discipline] = {
    "bsp": Discipline(
        "bsp",
        BSP,
        paper="-",
        does="Every step waits for all workers and folds one mean.",
        use="Workers are equally fast, or results must repeat to the bit.",
    ),
    "asp": Discipline(
        "asp",
        ASP,
        paper="-",
        does="No worker waits; each push is an update of its own.",
        use="Throughput counts most, and the step size bears stale gradients.",
    ),
    "ssp": Discipline(
        "ssp:s",
        SSP,
        paper="Zhao et al. (DSSP)",
        does="A worker is at most s steps ahead of the slowest.",
        use="Workers slow down now and then, none for good.",
        numbers=(int,),
    ),
    "dssp": Discipline(
        "dssp:lo,hi[,release=next-push|printed][,hard_bound=true]",
        DSSP,
        paper="Zhao et al. (DSSP)",
        does="As ssp, with a bound between lo and hi that follows the workers' speeds.",
        use="No single bound fits, because speeds change or differ.",
        numbers=(int, int),
        options=("release", "hard_bound"),
    ),
    "backup": Discipline(
        "backup:b",
        BackupWorkers,
        paper="Chen et al. (backup workers)",
        does="As bsp, without the b slowest pushes of each step.",
        use="A few workers are slow at random, and gradients must not be stale.",
        numbers=(int,),
    ),
    "psp": Discipline(
        "psp:c,f[,shards=K][,push_timeout=S][,pull_timeout=S]",
        PSP,
        paper="PSP-SGD",
        does="A step waits for c pushes, and for a fraction f of the shards.",
        use="Single messages come late on a network of many servers.",
        numbers=(int, float),
        options=("shards", "push_timeout", "pull_timeout"),
    ),
    "hardsync": Discipline(
        "hardsync:B",
        HardSync,
        paper="Gupta et al. (Rudra)",
        does="As bsp, with the learning rate scaled by the root of the batch over B.",
        use="The learning rate was tuned for a batch of B.",
        numbers=(int,),
    ),
    "softsync": Discipline(
        "softsync:n",
        SoftSync,
        paper="Gupta et al. (Rudra)",
        does="An update is the mean of N / n pushes of any version; no worker waits.",
        use="A middle between updates of all workers (n = 1) and asp (n = N).",
        numbers=(int,),
    ),
    "adv*": Discipline(
        "adv*:n[,groups=G]",
        RudraAdvStar,
        paper="Gupta et al. (Rudra)",
        does="As adv, with push and pull in threads of their own.",
        use="The tree is to be simulated with hidden transfers.",
        numbers=(int,),
        options=("groups",),
    ),
    "adv": Discipline(
        "adv:n[,groups=G]",
        RudraAdv,
        paper="Gupta et al. (Rudra)",
        does="As softsync, through a tree: a leaf passes its workers' pushes on together.",
        use="The tree of many learners is to be simulated.",
        numbers=(int,),
        options=("groups",),
    ),
    "r2sp": Discipline(
        "r2sp[:r][,tune=true]",
        R2SP,
        paper="Chen, Wang and Li (R2SP)",
        does="Updates and grants come in a fixed order, evenly apart.",
        use="All workers share one link that bsp fills in bursts.",
        numbers=(float,),
        defaults=1,
        options=("tune",),
    ),
    "auto": Discipline(
        "auto[:steps]",
        Auto,
        paper="-",
        does="Trains under bsp for some steps, then takes what fastps advise says.",
        use="You do not know which to take.",
        numbers=(int,),
        defaults=1,
    ),
    "policy": Discipline(
        "policy:fold=F,grant=G,...",
        Policy,
        paper="-",
        does="Any combination of the parts of fastps.Policy.",
        use="None of the others is what you want.",
        options=tuple(name for name in Policy.__dataclass_fields__ if name != "spec"),
    ),
}
