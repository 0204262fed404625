"""Accelerate and the Trainer of transformers, as the workers of one job."""

from pathlib import Path

import pytest

import fastps
from tests.clients import digits, programs

programs.needs("accelerate", "transformers")


ACCELERATED = """
import json
import torch
from accelerate import Accelerator
import fastps
from tests.clients import digits

accelerator = Accelerator(cpu=True)
model = digits.make_model()
wrapped = fastps.DistributedOptimizer(digits.make_sgd(model))
inputs, labels, _, _ = digits.data()
share = slice(fastps.rank(), None, fastps.world_size())
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs[share], labels[share]), batch_size=16, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, wrapped, loader)
steps = 0
for epoch in range(digits.EPOCHS):
    for images, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.cross_entropy(model(images), targets))
        optimizer.step()
        steps += 1
if fastps.rank() == 0:
    wrapped.wait_for_others()
result = {"accuracy": digits.accuracy(model), "steps": steps, "version": wrapped.version}
wrapped.close()
open(f"result-{fastps.rank()}.json", "w").write(json.dumps(result))
"""

TRAINED = """
import json
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


inputs, labels, _, _ = digits.data()
share = slice(fastps.rank(), None, fastps.world_size())
rows = [{"images": image, "labels": label} for image, label in zip(inputs[share], labels[share])]
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
if fastps.rank() == 0:
    wrapped.wait_for_others()
result = {"accuracy": digits.accuracy(model.net), "steps": trainer.state.global_step, "version": wrapped.version}
wrapped.close()
open(f"result-{fastps.rank()}.json", "w").write(json.dumps(result))
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


def launched(folder: str) -> None:
    """The function that accelerate's launcher calls: trains without an Accelerator."""
    model = digits.make_model()
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp")
    digits.train(model, optimizer, fastps.rank(), fastps.world_size())
    if fastps.rank() == 0:
        optimizer.wait_for_others()
        Path(folder, "result-0.json").write_text(f'{{"accuracy": {digits.accuracy(model)}, "workers": {fastps.world_size()}}}')
    optimizer.close()


def test_a_launcher_of_accelerate_starts_workers_of_one_job(tmp_path: Path) -> None:
    # In a separate process, because both libraries keep global state.
    program = (
        "import accelerate, sys\nfrom tests.clients.test_hugging_face import launched\n"
        "if __name__ == '__main__':\n"
        "    accelerate.debug_launcher(launched, ('.',), num_processes=2)\n"
    )
    ended = programs.run(program, tmp_path)
    assert ended.returncode == 0, ended.stderr
    (found,) = programs.results(tmp_path)
    assert found["workers"] == 2
    assert found["accuracy"] >= digits.least_accuracy()
