"""Modules, data and one call for tests of FastpsStrategy: a fit in forked workers, each of which leaves a file of results."""

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Sampler, TensorDataset

import fastps
from fastps.integrations.lightning import FastpsStrategy

_QUIET = {
    "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
    "use_distributed_sampler": False, "max_epochs": 1,
}  # fmt: skip


class Line(LightningModule):
    """Linear regression of 64 samples of 4 numbers; `seen` has the numbers of the samples of each training batch."""

    def __init__(self, learning_rate: float = 0.05) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.net = torch.nn.Linear(4, 1)
        with torch.no_grad():
            self.net.weight.copy_(torch.randn(1, 4, generator=generator))
            self.net.bias.zero_()
        self.learning_rate = learning_rate
        self.seen: list[list[int]] = []

    def loss(self, batch: Any) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.net(batch[0].to(self.net.weight.dtype)), batch[1].to(self.net.weight.dtype))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(batch[2].tolist())
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return batch[2].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


def data(samples: int = 64) -> TensorDataset:
    inputs = torch.randn(samples, 4, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(samples))


class _Strided(Sampler[int]):
    """Every N-th sample, from this worker's rank on: N workers' batches together are those of one process."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(fastps.rank(), self.samples, fastps.world_size()))

    def __len__(self) -> int:
        return self.samples // fastps.world_size()


def loader(samples: int = 64, batch: int = 4) -> Any:
    """Strided shares of the samples. Lightning's own sampler for shares would shuffle."""
    return DataLoader(data(samples), batch_size=batch, sampler=_Strided(samples))


def trainer(folder: Path, strategy: Any = None, workers: int = 2, **options: Any) -> Trainer:
    """A quiet Trainer of forked workers."""
    warnings.filterwarnings("ignore", module="lightning")
    given = {**_QUIET, "default_root_dir": folder, **options}
    strategy = strategy if strategy is not None else FastpsStrategy("bsp", start_method="fork")
    return Trainer(strategy=strategy, accelerator="cpu", devices=workers, **given)


def single(folder: Path, **options: Any) -> Trainer:
    """A quiet Trainer of Lightning's own, with one process."""
    given = {**_QUIET, "default_root_dir": folder, **options}
    return Trainer(accelerator="cpu", devices=1, **given)


class Noted(Line):
    """A Line whose workers write what `note` returns at the end of their fit, as JSON, into `result-RANK.json`.

    It may have more parts, by name.
    """

    def __init__(
        self, folder: Path, note: Callable[[Any], Any] | None = None, learning_rate: float = 0.05, **parts: torch.nn.Module
    ) -> None:
        super().__init__(learning_rate)
        self.folder, self.note = folder, note
        for name, part in parts.items():
            self.add_module(name, part)

    def on_fit_end(self) -> None:
        found = {
            "seen": self.seen,
            "steps": self.trainer.global_step,
            "weight": self.net.weight.detach().float().view(-1).tolist(),
            "metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            "note": self.note(self) if self.note else None,
        }
        (self.folder / f"result-{self.global_rank}.json").write_text(json.dumps(found))


def fit(module: Noted, *loaders: Any, strategy: Any = None, **options: Any) -> list[dict[str, Any]]:
    """Fit a module in forked workers. Returns what each of them has noted."""
    trainer(module.folder, strategy, **options).fit(module, *loaders)
    return results(module.folder)


def results(folder: Path) -> list[dict[str, Any]]:
    """What each worker has noted, in the order of ranks; the files are removed."""
    files = sorted(folder.glob("result-*.json"))
    found = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    return found
