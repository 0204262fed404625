"""The benchmarks by name, for `fastps bench`; a benchmark is imported only when it is requested."""

import importlib

from fastps.bench.measure import BenchOptions, Row
from fastps.errors import UsageError

BENCHES = ("kernels", "lane", "scheduler", "sim", "step", "rows", "train", "optimizer", "memory", "readers", "collectives")
ALONE = ("nodes",)  # not part of "all": it needs the rights of root


def run(name: str, options: BenchOptions) -> list[Row]:
    """Return the rows of one benchmark or of all. Raises UsageError for an unknown name, WrongResultError."""
    if name != "all" and name not in (*BENCHES, *ALONE):
        raise UsageError(f"expected one of {', '.join((*BENCHES, *ALONE))}, all; found {name!r}")
    on_gpu = {"kernels": options.backend == "cuda", "step": options.device == "cuda"}
    chosen = BENCHES if name == "all" else (name,)
    wanted = [f"gpu.{each}_cuda" if on_gpu.get(each) else each for each in chosen]
    modules = [importlib.import_module(f"fastps.bench.{each}") for each in wanted]
    return [row for module in modules for row in module.measure(options)]
