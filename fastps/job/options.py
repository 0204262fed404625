"""The options that a variable of the environment has: what each may be, its default, and its help.

A script's argument counts before the variable, and the variable before the default. A row judges all three. `fastps run` has an
option for each field of NodePolicy, and passes the policy to its workers by their variables.
"""

import contextlib
import functools
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from fastps.errors import UsageError
from fastps.job.launchers import whole
from fastps.kernels.shm.counts import MAX_LANES

logger = logging.getLogger("fastps.job")


class Range(NamedTuple):
    """The range of a number, in words and as its ends. `off` is allowed beside it, and says none."""

    text: str
    least: float
    most: float
    off: float = math.nan


@dataclass(frozen=True)
class Option:
    """One option."""

    variable: str  # its variable of the environment
    default: Any  # the value where nothing says another. Every value has its type.
    values: tuple[str, ...] | Range  # what it may be: words, or a range
    help: str = ""  # the help of the command line's option; "": there is none, or its command has another
    metavar: str = ""  # the value in the help, if it is not one of the words

    @property
    def name(self) -> str:
        """Its name as a parameter.

        >>> OPTIONS["FASTPS_STALL_MS"].name
        'stall_ms'
        """
        return self.variable.removeprefix("FASTPS_").lower()

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def shown(self) -> str:
        """Its name in errors, where it is an option of the command line."""
        return f"{self.flag} ({self.variable})"

    @property
    def words(self) -> str | None:
        """The words that it may be, as the command line shows them; None for a number."""
        return None if isinstance(self.values, Range) else "|".join(self.values)

    def read(self, given: Any, shown: str) -> Any:
        """The value that a text or a number is. Raises UsageError that names the option as `shown`."""
        if not isinstance(self.values, Range):
            if given not in self.values:
                raise UsageError(f"expected {shown} to be one of {', '.join(self.values)}, found {given!r:.40}")
            return given
        is_whole, value = isinstance(self.default, int), None
        with contextlib.suppress(ValueError, OverflowError):
            value = (
                float(given) if not is_whole else whole(given, int(self.values.most)) if isinstance(given, str) else int(given)
            )
        if value is None or not (self.values.least <= value <= self.values.most or value == self.values.off):
            kind = "a whole number" if is_whole else "a number"
            raise UsageError(f"expected {shown} to be {kind} of {self.values.text}, found {given!r:.40}")
        return value


def value_of(variable: str, given: Any = None) -> Any:
    """An option's value: the argument that was given, else its variable's if that is not empty, else the default.

    Raises UsageError for a value that it cannot be.

    >>> value_of("FASTPS_SERVER"), value_of("FASTPS_SERVER", "process")
    ('workers', 'process')
    """
    row = OPTIONS[variable]
    if given is not None and given != "":
        return row.read(given, row.name)
    return row.read(os.environ.get(variable) or row.default, variable)


OPTIONS = {
    option.variable: option
    for option in (
        Option("FASTPS_SERVER", "workers", ("workers", "process")),
        Option("FASTPS_ON_WORKER_LOSS", "stop", ("stop", "continue")),
        Option("FASTPS_NONFINITE", "reject", ("reject", "raise", "allow")),
        Option("FASTPS_MAX_WORKERS", 0, Range(f"0 (as many as at the start) to {MAX_LANES}", 0, MAX_LANES)),
        Option("FASTPS_MAX_READERS", 8, Range(f"0 (none) to {MAX_LANES}", 0, MAX_LANES)),
        Option("FASTPS_CHECKPOINT_EVERY", 1000, Range("0 or more updates", 0, 1 << 50)),
        Option("FASTPS_OVERWRITE", "0", ("0", "1")),
        # At most 31 years: a deadline in ns has 63 bits.
        Option("FASTPS_TIMEOUT", 300.0, Range("more than 0 and at most 1,000,000,000 seconds", 1e-9, 1e9)),
        # Of a fold that does not go on, before the others go on without its worker.
        Option("FASTPS_STALL_MS", 500.0, Range("100 ms or more, or 0 for none", 100, 1e9, off=0)),
        Option("FASTPS_PLACEMENT", "auto", ("auto", "host", "device")),
        # Twice the buckets of DistributedDataParallel, because a bucket costs each GPU a launch, and each worker events and
        # copies. An H100 folds so much in 0.1 ms and copies it over NVLink in 0.15 ms (by published bandwidths). Nobody has
        # measured either.
        Option("FASTPS_BUCKET_MB", 64.0, Range("0 (no overlap) or more megabytes of a bucket", 0, 1 << 30)),
        Option("FASTPS_TENSOR_LOOPS", "auto", ("auto", "attributes", "build")),
        Option("FASTPS_KEEP_MEMORY", "1", ("1", "0")),
        Option("FASTPS_TRUSTED_NETWORK", "0", ("0", "1")),
    )
}


def _field(variable: str, default: Any, values: tuple[str, ...] | Range, help_: str, metavar: str = "") -> Any:
    return field(default=default, metadata={"option": Option(variable, default, values, help_, metavar)})


@dataclass(frozen=True)
class NodePolicy:
    """How a job treats its nodes; the same on all of them. The help of each field says what it does.

    `link_dtype` rounds with error feedback. The home's rule with local steps is SGD with Nesterov momentum (arXiv 2311.08105,
    section 3.1). Raises UsageError for a value out of range.
    """

    within: str = _field("FASTPS_WITHIN", "bsp", ("bsp", "asp"), "Sum all workers of a node (bsp), or those that pushed (asp).")
    on_node_loss: str = _field(
        "FASTPS_ON_NODE_LOSS", "stop", ("stop", "continue"), "What the other nodes do when a node is lost."
    )
    timeout_s: float = _field(
        "FASTPS_NODE_TIMEOUT",
        3.0,
        Range("1 to 3600 seconds", 1, 3600),
        "A node that sends nothing for this long is lost.",
        "SECONDS",
    )
    link_dtype: str = _field(
        "FASTPS_LINK_DTYPE",
        "float32",
        ("float32", "bfloat16", "float16", "int8"),
        "Type in which floats travel: float32, bfloat16, float16, int8.",
        "TYPE",
    )
    local_steps: int = _field(
        "FASTPS_LOCAL_STEPS",
        0,
        Range("0 to 1,000,000 versions", 0, 1_000_000),
        "With --nnodes: each node trains by itself for H versions, then sends what it has moved (DiLoCo).",
        "H",
    )
    local_mix: float = _field(
        "FASTPS_LOCAL_MIX",
        1.0,
        Range("more than 0 and at most 1", 1e-6, 1),
        "With --local-steps: the share of the home's weights that a node takes.",
        "ALPHA",
    )
    outer_lr: float = _field(
        "FASTPS_OUTER_LR", 0.7, Range("more than 0", 1e-6, 1e6), "With --local-steps: the learning rate of node 0's rule."
    )
    outer_momentum: float = _field(
        "FASTPS_OUTER_MOMENTUM",
        0.9,
        Range("0 or more and less than 1", 0, 0.999999),
        "With --local-steps: its Nesterov momentum; 0: plain SGD.",
    )
    link: str = _field(
        "FASTPS_LINK", "gloo", ("gloo", "zmq"), "What carries bytes between nodes; zmq encrypts, and needs a secret."
    )
    local_fragments: int = _field(
        "FASTPS_LOCAL_FRAGMENTS",
        1,
        Range("1 to 1,000 fragments", 1, 1000),
        "With --local-steps: fragments of the model that are exchanged in turn (Streaming DiLoCo).",
        "P",
    )
    local_overlap: int = _field(
        "FASTPS_LOCAL_OVERLAP",
        0,
        Range("0 to 1,000,000 versions", 0, 1_000_000),
        "With --local-steps: versions that a node makes while an exchange takes place.",
        "TAU",
    )

    def __post_init__(self) -> None:
        for name, option in self.options().items():
            option.read(getattr(self, name), option.shown)
        shown = {name: option.shown for name, option in self.options().items()}
        steps, fragments, overlap = self.local_steps, self.local_fragments, self.local_overlap
        if not steps and (fragments > 1 or overlap):
            name = shown["local_fragments" if fragments > 1 else "local_overlap"]
            raise UsageError(f"{name}: expected {shown['local_steps']} beside it, found none")
        if fragments > 1 and steps % fragments:
            raise UsageError(
                f"{shown['local_fragments']}: fragments are exchanged at even distances: expected a divisor of the {steps}"
                f" local steps, found {fragments}"
            )
        if steps and overlap > steps // fragments:
            raise UsageError(
                f"{shown['local_overlap']}: one exchange ends before the next begins: expected at most"
                f" {steps // fragments} versions, which is local steps / fragments, found {overlap}"
            )

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """The option of each field."""
        return {each.name: each.metadata["option"] for each in fields(cls)}

    @classmethod
    def of_environment(cls) -> "NodePolicy":
        """The policy of this process's job. Raises UsageError."""
        given = {name: (option, os.environ.get(option.variable)) for name, option in cls.options().items()}
        return cls(**{name: option.read(text, option.shown) for name, (option, text) in given.items() if text})

    def environment(self) -> Mapping[str, str]:
        """The variables that pass this policy to workers."""
        return {option.variable: str(getattr(self, name)) for name, option in self.options().items()}


# Of the variables that no row describes, those that a user sets.
_OTHERS = [
    f"FASTPS_{name}" for name in ("SYNC", "JOB", "RANK", "WORKERS", "CHECKPOINT", "RESUME", "TRACE", "GPUS", "SECRET")
]  # fmt: skip


@functools.cache
def tell_misspelt() -> None:
    """Warn, once, of variables that fastps does not read, and whose names look like those of others that are not set."""
    from difflib import get_close_matches

    read = (*OPTIONS, *_OTHERS, *(option.variable for option in NodePolicy.options().values()))
    names = {variable.removeprefix("FASTPS_"): variable for variable in read}
    for variable in sorted(os.environ):
        if variable.startswith("FASTPS_") and variable not in read:
            for near in get_close_matches(variable.removeprefix("FASTPS_"), names, 1, 0.76):
                if names[near] not in os.environ:
                    logger.warning("fastps does not read the variable %s: is it %s?", variable, names[near])
