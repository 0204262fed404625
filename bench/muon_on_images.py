"""Muon beside AdamW on the demo's images, under every discipline: `python -m fastps.bench.muon_on_images`.

Four workers train the demo's CNN. Muon, in float32 and in Python, has the matrices between the first and the last layer, and
AdamW the rest; the other side is AdamW alone, which is compiled. Each has the best of its rates by the mean of the seeds.
docs/experiments/muon-on-images.md has the settings, which were fixed before the first run, and the result.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import fastps
from fastps.bench.optimizer import Muon
from fastps.lab.demo import data, models

WORKERS, BATCH, EPOCHS = 4, 16, 4
SYNC: tuple[str, ...] = ("bsp", "asp", "ssp:3", "dssp:3,15", "backup:1", "psp:3,1,shards=1")
SYNC += ("hardsync:64", "softsync:1", "softsync:4", "adv:4", "adv*:4", "r2sp")
SEEDS = 11, 12
RATES = {"muon": (0.005, 0.01, 0.02, 0.04), "adamw": (0.0005, 0.001, 0.002, 0.004)}
OF_THE_REST = 0.001  # AdamW's rate beside Muon


def optimizers_of(model: torch.nn.Module, name: str, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the inner layers and AdamW for the rest, or AdamW for all."""
    parameters = list(model.parameters())
    if name == "adamw":
        return [torch.optim.AdamW(parameters, lr=rate)]
    matrices = [each for each in parameters[2:-2] if each.ndim > 1]
    others = [each for each in parameters if all(each is not matrix for matrix in matrices)]
    return [Muon(matrices, lr=rate), torch.optim.AdamW(others, lr=OF_THE_REST)]


def train(rank: int, sync: str, name: str, rate: float, seed: int, epochs: int, file: str) -> None:
    """Train as one of the workers; worker 0 writes the accuracy of the last weights."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    images = data.load("mnist5k")
    model = models.model_for(images)
    inputs = models.inputs_of(images, images.train_images[rank::WORKERS])
    labels = torch.tensor(images.train_labels[rank::WORKERS])
    optimizers = [fastps.DistributedOptimizer(each, sync=sync, model=model) for each in optimizers_of(model, name, rate)]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(BATCH):  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.report_loss(loss.item(), len(chosen))
                optimizer.step()
    for optimizer in optimizers:
        optimizer.wait_for_others()
    if rank == 0:
        Path(file).write_text(str(models.accuracy(model, images)))
    for optimizer in optimizers:
        optimizer.close()


def accuracy(sync: str, name: str, rate: float, seed: int, epochs: int = EPOCHS) -> float:
    """The accuracy of one run, 0 to 1."""
    with tempfile.TemporaryDirectory(prefix="fastps-muon-") as folder:
        file = Path(folder) / "accuracy"
        fastps.spawn(train, (sync, name, rate, seed, epochs, str(file)), workers=WORKERS)
        return float(file.read_text())


def measured(sync: str) -> dict[str, Any]:
    """Both sides under one discipline: the mean accuracy at each rate."""
    found = {
        name: {str(rate): fmean(accuracy(sync, name, rate, seed) for seed in SEEDS) for rate in RATES[name]} for name in RATES
    }
    return {"sync": sync, **found}


def table(rows: list[dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = ["| discipline | Muon, % | its rate | AdamW, % | its rate | Muon - AdamW, points |", "|---|---|---|---|---|---|"]
    for row in rows:
        best = {name: max(row[name], key=row[name].get) for name in RATES}
        muon, adamw = (100 * row[name][best[name]] for name in RATES)
        lines.append(f"| `{row['sync']}` | {muon:.1f} | {best['muon']} | {adamw:.1f} | {best['adamw']} | {muon - adamw:+.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure all disciplines, or those that the file does not have yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--json",
        type=Path,
        required=True,
        metavar="FILE",
        help="write each discipline's row, and go on from those that are there",
    )
    file = parser.parse_args().json
    rows = json.loads(file.read_text()) if file.exists() else []
    for sync in (each for each in SYNC if all(row["sync"] != each for row in rows)):
        rows.append(measured(sync))
        file.write_text(json.dumps(rows, indent=1))
    print(table(sorted(rows, key=lambda row: SYNC.index(row["sync"]))))


if __name__ == "__main__":
    main()
