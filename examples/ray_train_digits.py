"""A Ray Train program: scikit-learn's digits, a small convolutional network, a checkpoint and a metric after each epoch.

python examples/ray_train_digits_plain.py --workers 1
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from fastps.integrations.ray import DistributedOptimizer, FastpsTrainer, prepare_data_loader, prepare_model

TEST = 360  # images that no worker trains on


def make_model() -> torch.nn.Sequential:
    """The network."""
    return torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()),
        *(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)),
    )


def train_loop(config: dict[str, Any]) -> None:
    """Train as one of Ray's workers, from the newest checkpoint if there is one."""
    torch.manual_seed(config["seed"])
    pixels, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    labels = torch.tensor(digits, dtype=torch.long)[order]
    loader = DataLoader(TensorDataset(images[TEST:], labels[TEST:]), batch_size=16, shuffle=True)
    loader = prepare_data_loader(loader)

    model, begin = make_model(), 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        begin = saved["epoch"] + 1
    model = prepare_model(model)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=config["lr"]), model=model)

    context = ray.train.get_context()
    for epoch in range(begin, config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        model.train()
        for batch, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch), targets).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = float((model(images[:TEST]).argmax(1) == labels[:TEST]).float().mean())
        with tempfile.TemporaryDirectory() as folder:
            reported = None
            if context.get_world_rank() == 0:
                torch.save({"model": getattr(model, "module", model).state_dict(), "epoch": epoch}, Path(folder) / "state.pt")
                reported = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"epoch": epoch, "accuracy": accuracy}, checkpoint=reported)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--cpus", type=float, default=0.25, help="Ray's CPUs for each worker")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="train once with each of these seeds")
    parser.add_argument("--storage", help="the folder for checkpoints and metrics (default: Ray's)")
    given = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, log_to_driver=False)
    scaling = ray.train.ScalingConfig(num_workers=given.workers, resources_per_worker={"CPU": given.cpus})
    for seed in given.seeds:
        run = ray.train.RunConfig(storage_path=given.storage, failure_config=ray.train.FailureConfig(max_failures=1))
        config = {"seed": seed, "epochs": given.epochs, "lr": given.lr}
        trainer = FastpsTrainer(train_loop, train_loop_config=config, sync="dssp:3,15", scaling_config=scaling, run_config=run)
        result = trainer.fit()
        accuracy, epoch = result.metrics["accuracy"], result.metrics["epoch"]
        print(f"seed {seed}: {accuracy:.1%} of {TEST} test images after epoch {epoch}", flush=True)
    ray.shutdown()
