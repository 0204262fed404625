"""A small GPT on the text of Python's own documentation, character by character, with what such scripts use.

Tied weights, bfloat16 in forward and backward, gradient accumulation, clipping, a cosine schedule with warm-up, weight decay of
the matrices only, a moving average of the weights, checkpoints, and runs that go on where an earlier one stopped.

python examples/language_model.py --steps 300
fastps run -n 2 examples/language_model.py
fastps run -n 2 examples/language_model.py --steps 2000 --checkpoint runs/gpt --every 100
fastps run -n 2 examples/language_model.py --steps 2000 --checkpoint runs/gpt --every 100 --resume runs/gpt
torchrun --standalone --nproc-per-node 2 examples/language_model.py
"""

import argparse
import contextlib
import json
import math
import pydoc_data.topics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import fastps


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps of the whole training, which the schedule spans (600)")
    parser.add_argument("--until", type=int, default=0, help="leave at this step, as if interrupted (0: at the end)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a backward (8)")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards of a step (2)")
    parser.add_argument("--context", type=int, default=64, help="characters of a sequence (64)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (0.003)")
    parser.add_argument("--average", type=float, default=0.98, help="decay of the moving average of the weights (0.98)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of forward and backward")
    parser.add_argument("--threads", type=int, default=1, help="threads of a worker: more rarely gain at this size (1)")
    parser.add_argument("--sync", default="bsp", help="any discipline of fastps (bsp)")
    parser.add_argument("--checkpoint", metavar="FOLDER", help="write checkpoints into this folder")
    parser.add_argument("--every", type=int, default=100, help="updates from one checkpoint to the next (100)")
    parser.add_argument("--resume", metavar="FOLDER", help="go on from a checkpoint, or from the newest of a folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the figures at the end into this file")
    return parser.parse_args()


class Text:
    """The documentation as numbers of characters; the last tenth is held out."""

    def __init__(self) -> None:
        topics = pydoc_data.topics.topics
        text = "\n".join(topics[name] for name in sorted(topics))
        self.characters = sorted(set(text))
        numbers = {character: number for number, character in enumerate(self.characters)}
        coded = torch.tensor([numbers[character] for character in text])
        self.train, self.held_out = coded[: len(coded) * 9 // 10], coded[len(coded) * 9 // 10 :]

    def batch(self, part: torch.Tensor, number: int, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences and their next characters. The number determines the batch, so a resumed run reads the same ones."""
        generator = torch.Generator().manual_seed(number)
        begins = torch.randint(len(part) - context, (size, 1), generator=generator)
        sequences = part[begins + torch.arange(context + 1)]
        return sequences[:, :-1], sequences[:, 1:]


class Block(nn.Module):
    """Causal attention over several heads, then two layers for each position; both add to their input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.positions = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next hidden states, of the same shape."""
        parts = self.queries_keys_values(self.norms[0](hidden)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix(attended.transpose(1, 2).flatten(2))
        return hidden + self.positions(self.norms[1](hidden))


class Gpt(nn.Module):
    """A GPT whose output layer is its table of embeddings: one Parameter in two modules."""

    def __init__(self, characters: int, arguments: argparse.Namespace) -> None:
        super().__init__()
        width = arguments.width
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(arguments.context, width)
        self.blocks = nn.Sequential(*(Block(width, arguments.heads) for _ in range(arguments.layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, characters, bias=False)
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.output.weight = self.characters.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The scores of each position's next character."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        return self.output(self.norm(self.blocks(self.characters(inputs) + self.places(places))))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, dtype: str) -> torch.Tensor:
        """Cross-entropy in nats a character; matrix products are of the dtype."""
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            scores = self(inputs)
        return functional.cross_entropy(scores.flatten(0, 1).float(), targets.flatten())


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW that decays matrices, but neither biases nor what normalizes."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def share_of_rate(step: int, steps: int) -> float:
    """A tenth of the steps warms up, then half a cosine goes down to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up)))


def train(arguments: argparse.Namespace, model: Gpt, optimizer: fastps.DistributedOptimizer, text: Text) -> float:
    """Make this worker's steps, from the job's step on. Returns the seconds."""
    begun, rank, workers = optimizer.worker.steps, fastps.rank(), fastps.world_size()
    if begun:
        print(f"worker {rank} goes on at step {begun}", flush=True)
    for group in optimizer.param_groups:
        group["lr"] = group.get("initial_lr", group["lr"])  # that of a resumed job is its last one
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(begun + step, arguments.steps))
    began = time.perf_counter()
    for step in range(begun, arguments.until or arguments.steps):
        optimizer.zero_grad()
        mean = 0.0
        for part in range(arguments.accumulate):
            number = (step * workers + rank) * arguments.accumulate + part
            inputs, targets = text.batch(text.train, number, arguments.batch_size, arguments.context)
            loss = model.loss(inputs, targets, arguments.dtype) / arguments.accumulate
            loss.backward()
            mean += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if rank == 0 and (step + 1) % 50 == 0:
            rate, seconds = schedule.get_last_lr()[0], time.perf_counter() - began
            print(f"step {step + 1} of {arguments.steps}: loss {mean:.3f}, lr {rate:.5f}, {seconds:.1f} s", flush=True)
    return time.perf_counter() - began


@torch.no_grad()
def held_out_loss(model: Gpt, text: Text, arguments: argparse.Namespace) -> float:
    """The mean loss of 16 batches of held-out text."""
    batches = [text.batch(text.held_out, number, 16, arguments.context) for number in range(16)]
    return sum(model.loss(*batch, arguments.dtype).item() for batch in batches) / len(batches)


@torch.no_grad()
def sample(model: Gpt, text: Text, context: int, length: int = 200, begin: str = "The ") -> str:
    """Text that the model makes, each character drawn by its chance."""
    generator = torch.Generator().manual_seed(0)
    coded = torch.tensor([[text.characters.index(character) for character in begin]])
    for _ in range(length):
        chances = torch.softmax(model(coded[:, -context:])[:, -1] / 0.8, -1)
        coded = torch.cat([coded, torch.multinomial(chances, 1, generator=generator)], 1)
    return "".join(text.characters[number] for number in coded[0].tolist())


def report(
    arguments: argparse.Namespace, model: Gpt, optimizer: fastps.DistributedOptimizer, text: Text, seconds: float
) -> None:
    """Judge the final weights and their average, and show text that the average makes."""
    figures = {"seconds": seconds, "version": optimizer.version, "held_out": held_out_loss(model, text, arguments)}
    figures["weights"] = sum(parameter.double().abs().sum().item() for parameter in model.parameters())
    with optimizer.averaged_weights():
        figures["held_out_of_average"] = held_out_loss(model, text, arguments)
        print(sample(model, text, arguments.context))
    print(f"{optimizer.version} updates, {seconds:.1f} s, held-out loss {figures['held_out']:.3f},", end=" ")
    print(f"of the average {figures['held_out_of_average']:.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures))


def main() -> None:
    """Train as one of the workers; worker 0 judges the result."""
    arguments = options()
    torch.set_num_threads(arguments.threads)
    text = Text()
    torch.manual_seed(arguments.seed)
    model = Gpt(len(text.characters), arguments)
    with fastps.DistributedOptimizer(
        adamw(model, arguments.lr),
        f"{arguments.sync},ema={arguments.average}" if arguments.average else arguments.sync,
        model=model,
        checkpoint=arguments.checkpoint,
        every=arguments.every if arguments.checkpoint else None,
        resume=arguments.resume,
    ) as optimizer:
        seconds = train(arguments, model, optimizer, text)
        if fastps.rank() == 0:
            optimizer.wait_for_others()
            report(arguments, model, optimizer, text, seconds)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
        sys.exit(0)
    sys.exit(130)
