"""The disciplines of the five papers: a table of rows, each a few values of a Policy, and the specs that name them.

Where a paper leaves a choice open, the docstring names the choice and its reason. docs/disciplines.md has a paragraph for each
row. A discipline is data, not a class.
"""

from collections.abc import Callable
from dataclasses import dataclass

from fastps.errors import PolicyError
from fastps.job.policy import DEFAULT_SHARDS, LEAST_WARM_UP, MAX_BOUND, Policy


def BSP() -> Policy:  # noqa: N802 - the papers' names
    """Bulk synchronous parallel: fold the mean of all workers' pushes of a version, then grant to all (DSSP paper, I.A.1).

    >>> BSP().spec
    'bsp'
    """
    return Policy(spec="bsp", fold="all", grant="next-version")


def ASP() -> Policy:  # noqa: N802
    """Asynchronous parallel: every push is folded when it arrives, and no worker waits (DSSP paper, section I.A.2)."""
    return Policy(spec="asp", fold="each", grant="at-once")


def SSP(s: int) -> Policy:  # noqa: N802
    """Stale synchronous parallel: a worker goes on while it is at most `s` pushes ahead of the slowest worker.

    The bound applies to grants, as line 8 of DSSP's Algorithm 1 tests it: the gap right after the next push may be s + 1.
    Raises PolicyError unless 0 <= s <= 1,000,000.

    >>> SSP(3).spec
    'ssp:3'
    """
    _check("ssp", "s", s, 0)
    return Policy(spec=f"ssp:{s}", fold="each", grant="bounded", low=s, high=s, release="printed")


def DSSP(lo: int, hi: int, *, release: str = "next-push", hard_bound: bool = False) -> Policy:  # noqa: N802
    """Dynamic SSP: beyond `lo` the fastest worker gets extra steps, as many as the controller predicts, up to `hi - lo`.

    Line 17 of Algorithm 1 has two readings. With "printed", a worker without credit waits until it is within `lo` again.
    With "next-push", the slowest worker's next push releases it: the instant whose wait the controller minimizes. This is the
    default, because only this reading always gives Table I's throughput (DSSP as fast as ASP, SSP half as fast). With two
    workers of speeds 3.1 : 1 and dssp:3,15, next-push makes ASP's 1.32 steps per unit of time; printed makes between SSP's 0.65
    and ASP's 1.32, depending on range, phase and jitter. Neither reading bounds the gap by `hi`. `hard_bound=True` caps the
    credit so that no worker is granted a step while it is more than `hi` ahead, which Theorem 2 needs; this costs the speed
    (0.65). As printed (line 14), r* = 3 lets a worker begin four steps; fastps keeps this.

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
    """Run bsp for `steps` steps, then the discipline that `fastps advise` recommends from them. For DistributedOptimizer only.

    Raises PolicyError unless 8 <= steps <= 10,000.

    >>> Auto().spec, Auto(100).spec
    ('auto', 'auto:100')
    """
    _check("auto", "steps", steps, LEAST_WARM_UP)
    return Policy(spec="auto" if steps == 32 else f"auto:{steps}", fold="all", grant="next-version", warm_up=steps)


def BackupWorkers(b: int) -> Policy:  # noqa: N802
    """Synchronous SGD with b backup workers: fold the mean of a version's first N - b gradients (Chen et al., Algorithm 4).

    A gradient of an older version is dropped and counted (line 6), and its worker continues at once with the newest weights.
    Here N counts all workers. In the paper N counts only the workers that are waited for, so N + b are started.

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

    A shard folds `push` gradients (c) of its version and those that arrive within `push_timeout` seconds (tau1) after them. The
    learning rate is multiplied by their number (line 13); later gradients are dropped. A worker computes when a fraction `pull`
    (b%) of the shards is fresh, or up to `pull_timeout` seconds (tau2) later, with old blocks for the rest (line 4). Both
    timeouts are 0 in the paper's experiments. In the printed algorithm the timestamp of a worker is always its own iteration
    number, so the gradients of a worker that falls behind are always dropped. Here the timestamp is the newest version that the
    worker has pulled. Probabilistic synchronous parallel is a different scheme of the same abbreviation.

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
    """Rudra's hardsync: bsp with the learning rate times sqrt(lambda mu / B) (section 3.2); B is the reference model's batch.

    lambda mu is the number of samples in all pushes of a version, so every push must report its batch size.

    >>> HardSync(128).spec
    'hardsync:128'
    """
    _check("hardsync", "B", reference_batch, 1)
    return Policy(
        spec=f"hardsync:{reference_batch}", fold="all", grant="next-version", scale="square-root", reference=reference_batch
    )


def SoftSync(n: int, *, scale: str = "divisor") -> Policy:  # noqa: N802
    """Rudra's n-softsync: fold the mean of floor(lambda / n) gradients of any version (equation 5); no worker waits.

    The learning rate is divided by n (equation 6). With scale="staleness" each gradient is divided by its own staleness instead
    (footnote 3). Up to MOST_SLOTS - 1 pushes of one worker may wait to be folded. A worker with more waits for a slot, as it
    would with Rudra's blocking sends.

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
    """Rudra-adv: n-softsync through a tree (section 3.3); a leaf passes on the gradients of its workers together.

    A leaf passes on its gradients when it holds as many as it has live workers, whichever workers they come from. The root
    counts gradients, not messages. On one node the root computes the leaves' sums in its single pass over memory.

    >>> RudraAdv(1).spec
    'adv:1'
    """
    _check("adv", "n", n, 1)
    spec = f"adv:{n}" + ("" if groups == 2 else f",groups={groups}")
    return Policy(spec=spec, fold="count", grant="at-once", scale="divisor", divisor=n, groups=groups)


def RudraAdvStar(n: int, *, groups: int = 2) -> Policy:  # noqa: N802
    """Rudra-adv*: Rudra-adv with push and pull in separate threads (section 3.3).

    A gradient is sent only after the one before was delivered. The newest weights wait in a communication buffer, and the
    worker takes them by a pointer swap.

    >>> RudraAdvStar(1).spec
    'adv*:1'
    """
    _check("adv*", "n", n, 1)
    spec = f"adv*:{n}" + ("" if groups == 2 else f",groups={groups}")
    return Policy(spec=spec, fold="count", grant="at-once", scale="divisor", divisor=n, groups=groups, overlap=True)


def R2SP(relax: float = 0.8, *, tune: bool = False) -> Policy:  # noqa: N802
    """Round-robin synchronous parallel (Chen, Wang and Li): updates and grants in a fixed order, evenly spaced.

    A push is folded when all pushes before it in the order are folded. Its worker is granted the next step in the same order,
    at the earliest relax x T / N after the last grant, where T is the slowest worker's mean iteration time (sections III-B, V).
    With `tune=True` the grant carries a batch size with which a fast worker takes as long as the slowest (section IV), and the
    learning rate of each push is multiplied by its batch / the first batch of its worker (Algorithm 1, worker, line 5).

    >>> R2SP(0.8, tune=True).spec
    'r2sp:0.8,tune=true'
    """
    spec = f"r2sp:{_number(relax)}" + (",tune=true" if tune else "")
    return Policy(spec=spec, fold="in-order", grant="round-robin", scale="batch" if tune else "one", relax=relax, tune=tune)


def _check(name: str, what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or not least <= value <= MAX_BOUND:
        raise PolicyError(f"{name}: expected {what} from {least} to {MAX_BOUND}, a whole number, found {value}")


def _number(value: object) -> str:
    """The shortest text that parses to the same number: 0.8, 1, 0.1234567."""
    if not isinstance(value, float | int):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(float(value))


@dataclass(frozen=True)
class Discipline:
    """A row of the table: the usage of the spec, the function that builds the policy, and what a user should know."""

    usage: str
    build: Callable[..., Policy]
    paper: str
    does: str
    use: str
    numbers: tuple[type, ...] = ()
    defaults: int = 0  # how many trailing numbers may be omitted
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
