"""What a step costs in Accelerate's loop and in the Trainer, beside the same step in a loop of one's own.

    python -P -m fastps.bench.integrations.hugging_face [--rounds 7] [--steps 300] [--json FILE]

The model is small, so that a step is nearly all overhead. One process runs blocks of each loop in turn. A figure is the median
over the rounds of a block's CPU time a step, which other work on the machine hardly moves; its wall time stands beside it. With
-P Python does not take the repository's folder `kernels` for the package of that name, which transformers looks for.
"""

import argparse
import contextlib
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fastps
from fastps.system.clock import SYSTEM_CLOCK

STEP_NS = 10_000_000  # a step of this length is what the shares refer to
BATCH = 16
Block = Callable[[int], tuple[float, float]]


class Classifier(torch.nn.Module):
    """A small network in the shape that the Trainer expects."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss and the logits."""
        logits = self.net(inputs)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def rows(steps: int) -> list[dict[str, torch.Tensor]]:
    """Samples for so many steps."""
    inputs, labels = torch.randn(steps * BATCH, 64), torch.randint(0, 10, (steps * BATCH,))
    return [{"inputs": one, "labels": label} for one, label in zip(inputs, labels, strict=True)]


def loader(steps: int) -> Any:
    """A loader of batches for so many steps."""
    return torch.utils.data.DataLoader(rows(steps), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


@contextlib.contextmanager
def timed(steps: int) -> Iterator[list[float]]:
    """CPU and wall time of the block, in microseconds a step."""
    found: list[float] = []
    cpu_ns, wall_ns = SYSTEM_CLOCK.thread_cpu_ns(), SYSTEM_CLOCK.now_ns()
    yield found
    found += [(SYSTEM_CLOCK.thread_cpu_ns() - cpu_ns) / 1e3 / steps, (SYSTEM_CLOCK.now_ns() - wall_ns) / 1e3 / steps]


def adam(model: torch.nn.Module) -> torch.optim.AdamW:
    """The optimizer of all loops."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def own_loop(steps: int) -> tuple[float, float]:
    """A loop of one's own with fastps.DistributedOptimizer."""
    model, batches = Classifier(), loader(steps)
    with fastps.DistributedOptimizer(adam(model), sync="asp") as optimizer, timed(steps) as found:
        for batch in batches:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return found[0], found[1]


def accelerate_loop(steps: int) -> tuple[float, float]:
    """The loop of Accelerate with fastps."""
    from fastps.integrations.accelerate import Accelerator

    accelerator = Accelerator(cpu=True, sync="asp")
    return _accelerated(accelerator, steps)


def plain_accelerate_loop(steps: int) -> tuple[float, float]:
    """The loop of Accelerate with torch's optimizer."""
    import accelerate

    return _accelerated(accelerate.Accelerator(cpu=True), steps)


def _accelerated(accelerator: Any, steps: int) -> tuple[float, float]:
    model = Classifier()
    model, optimizer, batches = accelerator.prepare(model, adam(model), loader(steps))
    with timed(steps) as found:
        for batch in batches:
            optimizer.zero_grad()
            accelerator.backward(model(**batch)["loss"])
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    accelerator.end_training()
    return found[0], found[1]


def plain_loop(steps: int) -> tuple[float, float]:
    """A loop of one's own with torch's optimizer."""
    model, batches = Classifier(), loader(steps)
    optimizer = adam(model)
    with timed(steps) as found:
        for batch in batches:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return found[0], found[1]


def trainer_loop(steps: int) -> tuple[float, float]:
    """The Trainer with fastps."""
    from fastps.integrations import transformers as with_fastps

    return _trained(with_fastps.Trainer, with_fastps.TrainingArguments, steps, sync="asp")


def plain_trainer_loop(steps: int) -> tuple[float, float]:
    """The Trainer with torch's optimizer."""
    import transformers

    return _trained(transformers.Trainer, transformers.TrainingArguments, steps)


def _trained(trainer: Any, arguments: Any, steps: int, **options: Any) -> tuple[float, float]:
    from transformers import TrainerCallback

    class Begin(TrainerCallback):  # type: ignore[misc]  # may be missing
        """Begins to count at the first step, and ends at the last."""

        def __init__(self) -> None:
            self.stack = contextlib.ExitStack()
            self.found: list[float] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Begin at the second step, after what is done once."""
            if state.global_step == 1:
                self.found = self.stack.enter_context(timed(steps - 1))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """End after the last step."""
            if state.global_step == steps:
                self.stack.close()

    begin = Begin()
    with tempfile.TemporaryDirectory() as folder:
        given = arguments(
            folder,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            remove_unused_columns=False,
            optim="adamw_torch",
            **options,
        )
        trainer(Classifier(), given, train_dataset=rows(steps), callbacks=[begin]).train()
    return begin.found[0], begin.found[1]


BLOCKS: dict[str, Block] = {
    "own loop": own_loop,
    "Accelerate": accelerate_loop,
    "Trainer": trainer_loop,
    "plain loop": plain_loop,
    "plain Accelerate": plain_accelerate_loop,
    "plain Trainer": plain_trainer_loop,
}


def measured(rounds: int, steps: int) -> dict[str, dict[str, float]]:
    """The medians of each loop, in microseconds a step, and what they are above the loop of one's own, in the pairs' median."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in BLOCKS}
    for _ in range(rounds):
        for name, block in BLOCKS.items():
            times[name].append(block(steps))
    found = {}
    for name, pairs in times.items():
        base = times["plain loop" if name.startswith("plain") else "own loop"]
        above = statistics.median(one[0] - other[0] for one, other in zip(pairs, base, strict=True))
        cpu_us, wall_us = (statistics.median(each) for each in zip(*pairs, strict=True))
        share = above * 1e3 / STEP_NS
        found[name] = {"cpu_us": cpu_us, "wall_us": wall_us, "above_us": above, "share_of_10_ms": share}
    return found


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each loop, in turn (7)")
    parser.add_argument("--steps", type=int, default=300, help="steps of a block (300)")
    parser.add_argument("--json", metavar="FILE", help="write the figures into this file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = measured(given.rounds, given.steps)
    print("| loop | CPU, us a step | wall, us a step | above the loop of one's own, us | of a step of 10 ms |")
    print("|---|--:|--:|--:|--:|")
    for name, row in found.items():
        print(f"| {name} | {row['cpu_us']:.0f} | {row['wall_us']:.0f} | {row['above_us']:.0f} | {row['share_of_10_ms']:.1%} |")
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
