"""The one table that joins oracles to the compiled scheduler: every module of this folder with an attribute `PLAYS` is in it.

An oracle gets its numbers from the text of a spec, and the scheduler from the policy that fastps makes of this text. So an
error in the discipline's own row shows as well.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fastps.job.policy import Policy
from fastps.job.specs import parse_policy
from fastps.kernels.scheduling.scheduler import Scheduler
from tests.oracles.combined import Combined
from tests.oracles.plays import Plays


@dataclass(frozen=True)
class Play:
    """One spec and its oracle. `spec_of` gives the spec for a number of workers; `name` stands in test ids and failures."""

    name: str
    plays: Plays
    spec_of: Callable[[int], str]

    @cached_property
    def combines(self) -> bool:
        """Whether pushes are found in drains, which are closed."""
        return self.policy(1).combine

    @property
    def events(self) -> int:
        return self.plays.events // 2 if self.combines else self.plays.events

    def policy(self, workers: int) -> Policy:
        return parse_policy(self.spec_of(workers))

    def oracle(self, workers: int) -> Any:
        numbers, options = _read(self.spec_of(workers))
        combines = options.pop("combine", False)
        oracle = self.plays.make(workers, *numbers, **options)
        return Combined(oracle) if combines else oracle

    def scheduler(self, workers: int) -> Scheduler:
        # The records alternate as in the arena, so that a change which the other record was not told of shows as well.
        return Scheduler(workers, alternate=True, **self.policy(workers).values(workers))


def play(spec: str, oracle: str = "") -> Play:
    """One spec of an oracle; without a name the oracle is that of the module which has the discipline's name."""
    return Play(spec, ORACLES[oracle or spec.replace(",", ":").partition(":")[0]], lambda workers: spec)


def _read(spec: str) -> tuple[list[Any], dict[str, Any]]:
    """The numbers and the options of a spec, read without the code under test."""
    _, *parts = spec.replace(":", ",").split(",")
    options = dict(part.split("=") for part in parts if "=" in part)
    return [_value(part) for part in parts if "=" not in part], {name: _value(text) for name, text in options.items()}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _oracles() -> Mapping[str, Plays]:
    """The oracles by the names of their modules."""
    found = [module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if not module.ispkg]
    names = [name for name in found if name != "table" and not name.startswith("test_")]
    modules = {name: importlib.import_module(f"tests.oracles.{name}") for name in names}
    return {name: module.PLAYS for name, module in modules.items() if hasattr(module, "PLAYS")}


ORACLES = _oracles()
PLAYED = [play(spec, name) for name, plays in ORACLES.items() for spec in plays.specs]
PLAYED += [Play(name, plays, spec_of) for plays in ORACLES.values() for name, spec_of in plays.sized.items()]
SIMULATED = [play(spec, name) for name, plays in ORACLES.items() for spec in plays.simulated]
