"""A small DLRM (arXiv 1906.00091): four tables of embeddings, of which a step touches a few thousand rows, on synthetic clicks.

The tables are layers with sparse=True, as in torch's own programs. Two torch optimizers step the model: Adam its perceptrons,
and SparseAdam the tables. Each is wrapped, which makes two jobs; these two lines and close() are all that fastps changes.

The clicks are drawn from a known truth, so the best possible loss is known, too. It runs alone, under
`fastps run -n 4 --sync asp examples/dlrm_small.py`, and under torchrun.
"""

import argparse
import time

import torch
from torch import nn

import fastps

TABLES, WIDTH, DENSE, LOOKUPS = 4, 16, 13, 26


class DLRM(nn.Module):
    """Embeddings and a perceptron of dense features meet in their pairwise products; a second perceptron gives the logit."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="sum", sparse=True) for _ in range(TABLES))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU())
        pairs = TABLES * (TABLES + 1) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH * (TABLES + 1) + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        self.first, self.second = torch.triu_indices(TABLES + 1, TABLES + 1, offset=1)

    def forward(self, dense: torch.Tensor, looked_up: list[torch.Tensor]) -> torch.Tensor:
        """Return the logit of a click for each sample; `looked_up` has the rows of each table: (samples, lookups)."""
        below = self.bottom(dense)
        features = torch.stack([below, *(table(rows) for table, rows in zip(self.tables, looked_up, strict=True))], 1)
        products = (features @ features.transpose(1, 2))[:, self.first, self.second]
        return self.top(torch.cat([features.flatten(1), products], 1)).squeeze(1)


class Clicks:
    """Batches of synthetic clicks. A row's number decides how much it adds to the logit; a few rows are looked up often."""

    def __init__(self, rows: int, batch_size: int, seed: int) -> None:
        self.rows, self.batch_size = rows, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.shares = [LOOKUPS // TABLES + (table < LOOKUPS % TABLES) for table in range(TABLES)]

    def batch(self) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor, torch.Tensor]:
        """Dense features, rows of each table, clicks, and the true probabilities of the clicks."""
        dense = torch.randn(self.batch_size, DENSE, generator=self.generator)
        looked_up, logits = [], 0.3 * dense.sum(1)
        for table, share in enumerate(self.shares):
            # Popularity falls as a power of the row's number, as that of items does.
            rows = (self.rows * torch.rand(self.batch_size, share, generator=self.generator) ** 6).long()
            looked_up.append(rows)
            logits = logits + torch.sin(rows.double() * 12.9898 + table).float().sum(1) * 0.5
        truth = torch.sigmoid(logits)
        return dense, looked_up, torch.bernoulli(truth, generator=self.generator), truth


def main() -> None:
    """Train, and print the loss on new clicks beside the best possible one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of each table")
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=600, help="of all workers together")
    parser.add_argument("--lr", type=float, default=0.01)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = DLRM(options.rows)
    clicks = Clicks(options.rows, options.batch_size, seed=1 + fastps.rank())
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    optimizers = [
        fastps.DistributedOptimizer(torch.optim.Adam(dense, lr=options.lr)),
        fastps.DistributedOptimizer(torch.optim.SparseAdam(list(model.tables.parameters()), lr=options.lr)),
    ]
    began = time.monotonic()
    for step in range(options.steps // fastps.world_size()):
        features, looked_up, clicked, _ = clicks.batch()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(features, looked_up), clicked)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if step % 20 == 0 and fastps.rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    seconds = time.monotonic() - began
    for optimizer in optimizers:
        optimizer.wait_for_others()
        optimizer.close()

    if fastps.rank() == 0:
        judged = Clicks(options.rows, 20_000, seed=0)
        features, looked_up, clicked, truth = judged.batch()
        with torch.no_grad():
            found = nn.functional.binary_cross_entropy_with_logits(model(features, looked_up), clicked)
        best = nn.functional.binary_cross_entropy(truth, clicked)
        base = clicked.mean()
        constant = nn.functional.binary_cross_entropy(base.expand_as(clicked), clicked)
        learned = (constant - found) / (constant - best)
        print(
            f"loss {found:.4f}, at best {best:.4f}, of the mean alone {constant:.4f}: {100 * learned:.0f} % learned in"
            f" {seconds:.1f} s"
        )


if __name__ == "__main__":
    main()
