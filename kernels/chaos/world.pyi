from collections.abc import Mapping
from typing import Any

class World:
    def run(
        self,
        seed: int,
        *,
        workers: int,
        steps: int,
        shards: int,
        slots: int,
        adagrad: bool,
        is_sum: bool,
        is_mean: bool,
        may_drop: bool,
        bound: int,
        partial: bool,
        at_once: bool,
        helpers: int,
        shared_least: int,
        spins: int,
        switch: float,
        crash: float,
        stall: float,
        wake: float,
        null: float,
        crashes: int,
        stalls: int,
        restarts: int,
        busy_factor: int,
        skew_ns: float,
        policy: Mapping[str, Any],
    ) -> dict[str, Any]: ...
