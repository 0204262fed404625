"""A classifier of scikit-learn's digits in Lightning, trained by four workers: `python main.py [EPOCHS [SEED]]`."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from fastps.integrations.lightning import FastpsStrategy


class Digits(LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(256, 10),
        )
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch, index):
        """The loss of a batch."""
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        """Count correct answers."""
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def configure_optimizers(self):
        """SGD, whose learning rate falls to 0."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main(epochs: int = 10, seed: int = 0) -> None:
    """Train, then test the best checkpoint."""
    seed_everything(seed, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, validation, test = random_split(data, [1197, 300, 300], torch.Generator().manual_seed(1))
    module = Digits()
    best = ModelCheckpoint(monitor="accuracy", mode="max")
    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=FastpsStrategy("dssp:3,15"),
        max_epochs=epochs,
        callbacks=[best],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(training, batch_size=16, shuffle=True), DataLoader(validation, batch_size=50))
    found = trainer.test(module, DataLoader(test, batch_size=50), ckpt_path="best", verbose=False)
    if trainer.is_global_zero:
        print(f"accuracy {found[0]['accuracy']:.3f} after {epochs} epochs, {trainer.global_step} steps a worker")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
