"""The time of a step of GPT-2 on a GPU, alone or under fastps.

`python -m fastps.bench.gpu.gpt_step --plain` is one process with torch's fused AdamW, and `fastps run --gpus 0 -n 2 -m
fastps.bench.gpu.gpt_step` two workers that share the batch. Both print the mean of 20 steps in ms.
"""

import argparse
import json
import os
from typing import Any

import torch
from torch.nn import functional

import fastps
from fastps.system.clock import SYSTEM_CLOCK

WIDTH, HEADS, BLOCKS, TOKENS, CONTEXT, SAMPLES = 768, 12, 12, 50_304, 1024, 8
WARM_UP, STEPS = 4, 20


class Block(torch.nn.Module):
    """Attention and two dense layers, each behind a norm and beside a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.attention, self.joined = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the next block (float[samples, tokens, WIDTH], as those given)."""
        samples, tokens, _ = values.shape
        parts = self.attention(self.first(values)).view(samples, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        values = values + self.joined(seen.transpose(1, 2).reshape(samples, tokens, WIDTH))
        dense: torch.Tensor = self.narrow(functional.gelu(self.wide(self.second(values))))
        return values + dense


class Model(torch.nn.Module):
    """GPT-2's sizes and tied embeddings: 124 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = torch.nn.Embedding(TOKENS, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = torch.nn.Sequential(*(Block() for _ in range(BLOCKS))), torch.nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (float[samples, tokens, TOKENS]) of int64[samples, tokens]."""
        values = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits: torch.Tensor = self.norm(self.blocks(values)) @ self.words.weight.T
        return logits


def step_ms(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """The mean time of STEPS steps, after WARM_UP others."""
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began_ns = SYSTEM_CLOCK.now_ns()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens)
        functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    torch.cuda.synchronize()
    return (SYSTEM_CLOCK.now_ns() - began_ns) / STEPS / 1e6


def main() -> None:
    """Print the time as JSON, as worker 0 or the only process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", action="store_true", help="torch's fused AdamW, without fastps")
    parser.add_argument("--sync", default="bsp", help="the discipline (default: bsp)")
    options = parser.parse_args()
    torch.manual_seed(fastps.rank())
    model = Model().cuda()
    tokens = torch.randint(0, TOKENS, (SAMPLES // fastps.world_size(), CONTEXT), device="cuda")
    inner: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=options.plain or None)
    if options.plain:
        found = step_ms(model, inner, tokens)
    else:
        with fastps.DistributedOptimizer(inner, sync=options.sync) as optimizer:
            optimizer.wait_for_start()
            found = step_ms(model, optimizer, tokens)
            optimizer.wait_for_others()
    if fastps.rank() == 0:
        shown = {"workers": fastps.world_size(), "plain": options.plain, "sync": options.sync}
        print(json.dumps({**shown, "nonfinite": os.environ.get("FASTPS_NONFINITE", "reject"), "ms": round(found, 3)}))


if __name__ == "__main__":
    main()
