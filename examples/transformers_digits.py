"""A small ConvNeXt on handwritten digits with the Trainer of transformers and fastps.

python examples/transformers_digits.py
fastps run -n 2 --sync ssp:3 examples/transformers_digits.py --accumulate 1 --lr 0.0035
fastps run -n 2 examples/transformers_digits.py --bf16
torchrun --standalone --nproc-per-node 2 examples/transformers_digits.py
"""

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import ConvNextConfig, ConvNextForImageClassification, EvalPrediction, TrainerCallback

from fastps.integrations.transformers import Trainer, TrainingArguments


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a backward of one process (16)")
    parser.add_argument("--accumulate", type=int, default=2, help="backwards of a step (2)")
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate (0.005)")
    parser.add_argument("--bf16", action="store_true", help="forward and backward in bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FOLDER", default="runs/transformers-digits", help="where checkpoints are")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint of --out")
    parser.add_argument("--until", type=int, default=0, help="stop after this epoch, as if interrupted (0: at the end)")
    parser.add_argument("--json", metavar="FILE", help="write the figures at the end into this file")
    return parser.parse_args()


def make_rows() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """1,437 images to train with, and 360 to test with."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    inputs = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)[order] / 8 - 1
    targets = torch.tensor(labels)[order]
    rows = [{"pixel_values": image, "labels": label} for image, label in zip(inputs, targets, strict=True)]
    return rows[360:], rows[:360]


def make_model() -> ConvNextForImageClassification:
    """The network, with random weights: nothing is downloaded."""
    size = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_stages": 2, "hidden_sizes": [24, 48], "depths": [1, 1]}
    return ConvNextForImageClassification(ConvNextConfig(num_labels=10, **size))


def accuracy_of(found: EvalPrediction) -> dict[str, float]:
    """The share of the images that were classified correctly."""
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def main() -> None:
    """Train, evaluate and save after each epoch, and load the best weights at the end."""
    given = options()
    torch.set_num_threads(1)  # more rarely gain at this size
    torch.manual_seed(given.seed)
    arguments = TrainingArguments(
        output_dir=given.out,
        num_train_epochs=given.epochs,
        per_device_train_batch_size=given.batch_size,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=given.lr,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=1.0,
        bf16=given.bf16,
        seed=given.seed,
        use_cpu=True,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        logging_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    train, test = make_rows()
    model = make_model()
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=test, compute_metrics=accuracy_of)
    if given.until:
        trainer.add_callback(StopAfter(given.until))
    trainer.train(resume_from_checkpoint=given.resume)
    metrics = trainer.evaluate()
    if given.json and trainer.is_world_process_zero():
        weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
        steps, processes = trainer.state.global_step, arguments.world_size
        figures = {"accuracy": metrics["eval_accuracy"], "weights": weights, "steps": steps, "processes": processes}
        Path(given.json).write_text(json.dumps(figures))


class StopAfter(TrainerCallback):
    """Stops after an epoch, as an interrupted run does."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def on_epoch_end(self, args, state, control, **kwargs) -> None:
        """Stop if this was the epoch."""
        if state.epoch >= self._epoch:
            control.should_training_stop = True


if __name__ == "__main__":
    main()
