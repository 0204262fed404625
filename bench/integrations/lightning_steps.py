"""The cost of a step under Lightning's Trainer with FastpsStrategy, beside a loop of one's own, on one module.

    fastps run -n 2 python -m fastps.bench.integrations.lightning_steps --rounds 7

Four sides alternate in each worker: the plain torch loop and Lightning's Trainer in one process, then the own loop with a
DistributedOptimizer and the Trainer with FastpsStrategy. The strategy's price is "FastpsStrategy - Trainer": the same Trainer,
module and batches under Lightning's own strategy and under fastps, whose step also pushes, folds and pulls. A step computes
for about `--compute-ms`. A side's time in a round is the median of its steps' times, and a tenth of them is shorter than the
other figure; both are in processor time of the process and in wall time. On a busy machine the short steps in processor time
say most. Worker 0 prints medians over rounds.
"""

import argparse
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import fastps
from fastps.integrations.lightning import FastpsStrategy

_WIDTH, _BATCH, _WARM_UP = 256, 32, 5


class Module(LightningModule):
    """A network of two layers, before which a product of matrices uses up the rest of the step's time."""

    def __init__(self, products: int, steps: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.ReLU(), torch.nn.Linear(_WIDTH, 10))
        self.products, self.steps = products, steps
        self.marks: list[tuple[int, int]] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """The loss of a batch."""
        if index >= _WARM_UP:
            self.marks.append((time.process_time_ns(), time.monotonic_ns()))
        work(self.products)
        loss: torch.Tensor = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def of_a_step(self) -> dict[str, float]:
        """Figures of this module's steps, in us."""
        found = {}
        for column, name in enumerate(("cpu", "wall")):
            marks = [mark[column] for mark in self.marks]
            times = sorted((after - before) / 1000 for before, after in itertools.pairwise(marks))
            found[f"{name}_us_median"] = statistics.median(times)
            found[f"{name}_us_tenth"] = times[len(times) // 10]
        return found


_MATRIX = torch.randn(192, 192)


def work(products: int) -> None:
    """Compute for as long as so many products of matrices take."""
    found = _MATRIX
    for _ in range(products):
        found = _MATRIX @ found * 0.05


def products_of(compute_ms: float) -> int:
    """How many products take so long on this processor."""
    work(50)
    began = time.process_time_ns()
    work(200)
    return max(0, round(compute_ms * 1e6 / ((time.process_time_ns() - began) / 200)))


def loader(steps: int) -> "DataLoader[Any]":
    """The same batches for all sides; one more than is measured."""
    generator = torch.Generator().manual_seed(1)
    samples = (steps + 1) * _BATCH
    inputs = torch.randn(samples, _WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(10, (samples,), generator=generator)), batch_size=_BATCH)


def by_hand(module: Module, steps: int, wrap: Callable[[Any], Any]) -> None:
    """A loop of one's own."""
    optimizer = wrap(module.configure_optimizers())
    for index, batch in enumerate(loader(steps)):
        loss = module.training_step(batch, index)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    if isinstance(optimizer, fastps.DistributedOptimizer):
        optimizer.close()


def by_trainer(module: Module, steps: int, **options: Any) -> None:
    """The Trainer, without what it does beside the loop."""
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    Trainer(accelerator="cpu", devices=1, max_epochs=1, use_distributed_sampler=False, **off, **options).fit(
        module, loader(steps)
    )


def measure(rounds: int, steps: int, compute_ms: float, sync: str) -> dict[str, Any]:
    """Each side's time of a step, and the differences within a round, in us."""
    products = products_of(compute_ms)
    sides: dict[str, Callable[[Module], None]] = {
        "torch": lambda module: by_hand(module, steps, lambda optimizer: optimizer),
        "Trainer": lambda module: by_trainer(module, steps),
        "own loop": lambda module: by_hand(
            module, steps, lambda optimizer: fastps.DistributedOptimizer(optimizer, sync, model=module)
        ),
        "FastpsStrategy": lambda module: by_trainer(module, steps, strategy=FastpsStrategy(sync)),
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            module = Module(products, steps)
            run(module)
            times[name].append(module.of_a_step())
    found: dict[str, Any] = {"workers": fastps.world_size(), "sync": sync, "rounds": rounds, "steps": steps}
    for figure in times["torch"][0]:
        found[figure] = {name: round(statistics.median(row[figure] for row in rows)) for name, rows in times.items()}
        extra = [_differences({name: rows[number][figure] for name, rows in times.items()}) for number in range(rounds)]
        for name in extra[0]:
            values = sorted(round(each[name]) for each in extra)
            found[figure][name] = {"median": statistics.median(values), "all": values}
    return found


def _differences(of: dict[str, float]) -> dict[str, float]:
    """What each layer adds: the strategy beside the same Trainer's own, and Lightning's loop with and without fastps."""
    trainer, strategy = of["Trainer"] - of["torch"], of["FastpsStrategy"] - of["own loop"]
    return {
        "FastpsStrategy - Trainer": of["FastpsStrategy"] - of["Trainer"],
        "own loop - torch": of["own loop"] - of["torch"],
        "Trainer - torch": trainer,
        "FastpsStrategy - own loop": strategy,
        "(FastpsStrategy - own loop) - (Trainer - torch)": strategy - trainer,
    }


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each side in a round")
    parser.add_argument("--compute-ms", type=float, default=9.0, help="processor time of a step beside the network's")
    parser.add_argument("--sync", default="asp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = measure(options.rounds, options.steps + _WARM_UP, options.compute_ms, options.sync)
    if fastps.rank() == 0:
        print(json.dumps(found, indent=1))
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
