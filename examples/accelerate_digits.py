"""A small convolutional network on handwritten digits with Hugging Face Accelerate and fastps.

python examples/accelerate_digits.py
fastps run -n 2 --sync ssp:3 examples/accelerate_digits.py
fastps run -n 2 examples/accelerate_digits.py --checkpoint runs/digits --mixed-precision bf16
torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py
"""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import set_seed
from sklearn.datasets import load_digits

from fastps.integrations.accelerate import Accelerator


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="samples of a backward of one process (8)")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards of a step (2)")
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate (0.002)")
    parser.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", metavar="FOLDER", help="save the whole state into this folder after each epoch")
    parser.add_argument("--resume", metavar="FOLDER", help="go on from a state that --checkpoint saved")
    parser.add_argument("--until", type=int, default=0, help="stop after this epoch, as if interrupted (0: at the end)")
    parser.add_argument("--json", metavar="FILE", help="write the figures at the end into this file")
    return parser.parse_args()


def make_model() -> torch.nn.Module:
    """The network, for images of 8 x 8 pixels."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * 16, 10),
    )


def make_loaders(batch_size: int) -> tuple[torch.utils.data.DataLoader, torch.utils.data.DataLoader]:
    """Loaders of 1,437 images to train with and of 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 16
    data = torch.utils.data.TensorDataset(inputs, torch.tensor(labels)[order])
    train = torch.utils.data.Subset(data, range(360, len(labels)))
    test = torch.utils.data.Subset(data, range(360))
    return (
        torch.utils.data.DataLoader(train, batch_size=batch_size, shuffle=True),
        torch.utils.data.DataLoader(test, batch_size=64),
    )


def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: torch.utils.data.DataLoader) -> float:
    """The share of the test images that the model classifies correctly."""
    accelerator.wait_for_everyone()
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for images, labels in loader:
            found, wanted = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            right, seen = right + int((found == wanted).sum()), seen + len(wanted)
    return right / seen


def main() -> None:
    """Train, evaluate after each epoch, and save."""
    given = options()
    torch.set_num_threads(1)  # more rarely gain at this size
    set_seed(given.seed)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=given.accumulate, mixed_precision=given.mixed_precision)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr)
    train, test = make_loaders(given.batch_size)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=given.epochs * len(train) // given.accumulate)
    model, optimizer, train, test, scheduler = accelerator.prepare(model, optimizer, train, test, scheduler)
    first = 0
    if given.resume:
        accelerator.load_state(given.resume)
        first = json.loads(Path(given.resume, "epoch.json").read_text())
    accuracy = 0.0
    for epoch in range(first, given.until or given.epochs):
        model.train()
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accuracy = evaluate(accelerator, model, test)
        accelerator.print(f"epoch {epoch + 1}: {accuracy:.1%} of the test images")
        if given.checkpoint:
            accelerator.save_state(given.checkpoint)
            if accelerator.is_main_process:
                Path(given.checkpoint, "epoch.json").write_text(json.dumps(epoch + 1))
    weights = sum(parameter.detach().double().sum() for parameter in model.parameters())
    every = accelerator.gather(torch.as_tensor(weights).view(1)).tolist()
    if given.json and accelerator.is_main_process:
        figures = {"accuracy": accuracy, "weights": every, "processes": accelerator.num_processes}
        Path(given.json).write_text(json.dumps(figures))
    accelerator.end_training()


if __name__ == "__main__":
    main()
