"""Accelerate and the Trainer of transformers, as the workers of one job."""

from pathlib import Path

import pytest

import fastps
from tests.clients import digits, programs

programs.needs("accelerate", "transformers")


ACCELERATED = """
import torch
from accelerate import Accelerator
import fastps
from tests.clients import digits

accelerator = Accelerator(cpu=True)
model = digits.make_model()
wrapped = fastps.DistributedOptimizer(digits.make_sgd(model))
model, optimizer, loader = accelerator.prepare(model, wrapped, digits.loader())
steps = 0
for epoch in range(digits.EPOCHS):
    for images, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), targets))
        optimizer.step()
        steps += 1
digits.report(model, steps, wrapped)
"""

TRAINED = """
import torch
from transformers import Trainer, TrainingArguments
import fastps
from tests.clients import digits


class Labelled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = digits.make_model()

    def forward(self, images, labels):
        logits = self.net(images)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


rows = [{"images": image, "labels": label} for image, label in digits.loader().dataset]
model = Labelled()
wrapped = fastps.DistributedOptimizer(digits.make_sgd(model))
schedule = torch.optim.lr_scheduler.ConstantLR(wrapped, factor=1.0)
arguments = TrainingArguments(
    output_dir="out", num_train_epochs=digits.EPOCHS, per_device_train_batch_size=16, use_cpu=True, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=0.0, remove_unused_columns=False,
    seed=fastps.rank(),
)
trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(wrapped, schedule))
trainer.train()
digits.report(model.net, trainer.state.global_step, wrapped)
"""


@pytest.mark.parametrize("program", [ACCELERATED, TRAINED], ids=["accelerate", "trainer"])
def test_program_learns_what_the_plain_one_learns(program: str, tmp_path: Path) -> None:
    programs.check_two_workers(program, tmp_path)


def test_program_that_averages_gradients_as_well_is_refused_by_name(tmp_path: Path) -> None:
    """Accelerate wraps the model in DDP, also for a Trainer."""
    ended = programs.run(ACCELERATED, tmp_path, workers=2, env="torchrun")
    assert ended.returncode == 1
    assert "inside DistributedDataParallel" in ended.stderr
    assert "fastps run --env fastps" in ended.stderr


def launched() -> None:
    """The function that accelerate's launcher calls: trains without an Accelerator."""
    model = digits.make_model()
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp")
    digits.report(model, digits.train(model, optimizer, fastps.rank(), fastps.world_size()), optimizer)


def test_a_launcher_of_accelerate_starts_workers_of_one_job(tmp_path: Path) -> None:
    # In a separate process, because both libraries keep global state.
    program = (
        "import accelerate, sys\nfrom tests.clients.test_hugging_face import launched\n"
        "if __name__ == '__main__':\n"
        "    accelerate.debug_launcher(launched, (), num_processes=2)\n"
    )
    programs.check_two_workers(program, tmp_path, workers=0)
