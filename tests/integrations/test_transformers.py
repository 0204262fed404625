"""transformers' Trainer with fastps: the example, checkpoints, the best model, a second training, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UnsupportedError, UsageError
from tests.clients.programs import needs, results
from tests.integrations import programs

needs("accelerate", "transformers")

ROOT = Path(__file__).parents[2]
SMALL = ("--epochs", "4", "--accumulate", "1", "--lr", "0.005", "--out", "out")


def test_example_differs_from_its_plain_program_in_two_lines() -> None:
    assert programs.changed_lines("transformers_digits_plain.py", "transformers_digits.py") == [
        "from transformers import ConvNextConfig, ConvNextForImageClassification, EvalPrediction, TrainerCallback",
        "from fastps.integrations.transformers import Trainer, TrainingArguments",
    ]


@pytest.mark.parametrize("way", ["alone", "accelerate launch"])
def test_example_learns(way: str, tmp_path: Path) -> None:
    found = programs.figures(way, "transformers_digits.py", tmp_path, *SMALL, sync="asp")
    workers = 1 if way == "alone" else 2
    assert found["processes"] == workers
    assert found["steps"] == 4 * (90 // workers)
    assert found["accuracy"] > 0.7  # a guess has 0.1


def test_run_that_stopped_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    stopped = programs.figures("fastps run", "transformers_digits.py", tmp_path, *SMALL, "--until", "2", sync="asp")
    assert stopped["steps"] == 90
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"checkpoint-45", "checkpoint-90"}
    resumed = programs.figures("fastps run", "transformers_digits.py", tmp_path, *SMALL, "--resume", "--bf16", sync="asp")
    assert resumed["steps"] == 180
    assert resumed["accuracy"] > stopped["accuracy"] - 0.02


PROGRAM = """
import json, torch
from fastps.integrations.transformers import Trainer, TrainingArguments
from transformers import GPT2Config, GPT2LMHeadModel

text = torch.randint(0, 11, (64,), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": text[place : place + 8], "labels": text[place : place + 8]} for place in range(48)]
torch.manual_seed(2)  # of twenty seeds, two begin so badly that 40 steps lower the loss by less than 0.2
model = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=16, n_layer=1, n_head=2))
arguments = TrainingArguments(
    "out", max_steps=40, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True, report_to=[], disable_tqdm=True,
    logging_steps=10, save_strategy="no", OPTIONS
)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
losses = [trainer.evaluate()["eval_loss"]]
for again in range(2):
    trainer.train()
    losses.append(trainer.evaluate()["eval_loss"])
weights = float(sum(each.detach().double().sum() for each in model.parameters()))
steps = {float(entry["step"]) for entry in trainer.optimizer.state.values()}
kind = type(trainer.optimizer).__name__
logged = [entry for entry in trainer.state.log_history if "loss" in entry]
result = {"losses": losses, "weights": weights, "kind": kind, "logged": len(logged), "steps": sorted(steps)}
open("result-%d.json" % arguments.process_index, "w").write(json.dumps(result))
"""


def _results(folder: Path, options: str, sync: str) -> tuple[list[dict[str, Any]], str]:
    ended = programs.run_text(PROGRAM.replace("OPTIONS", options), folder, sync=sync)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return results(folder), ended.stdout


@pytest.mark.parametrize(
    ("options", "sync"), [("average_tokens_across_devices=True", "bsp"), ("optim='adamw_torch'", "backup:1")]
)
def test_language_model_trains_twice_and_evaluates_in_between(options: str, sync: str, tmp_path: Path) -> None:
    found, output = _results(tmp_path, options, sync)
    assert len(found) == 2
    assert found[0]["losses"][1] < found[0]["losses"][0] - 0.05, (
        "it learns; how much, with late pushes dropped, depends on the cores"
    )
    assert found[0]["losses"][2] < found[0]["losses"][1]
    assert found[0]["losses"] == pytest.approx(found[1]["losses"]), "all workers show one version, and gather all losses"
    assert found[0]["weights"] == found[1]["weights"]
    assert found[0]["kind"] == "AdamW", "after training the optimizer is torch's, with the job's state"
    assert max(found[0]["steps"]) == max(found[1]["steps"]) > 40
    assert output.count("'eval_loss'") == 3, "worker 0 alone logs"


INTERRUPTED = """
import sys, torch
import transformers
from fastps.integrations import transformers as with_fastps

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}

class Stop(transformers.TrainerCallback):
    steps = 0
    def on_step_end(self, *arguments, **options):
        self.steps += 1
        if self.steps == 3:
            raise KeyboardInterrupt

def weights(package, **more):
    torch.manual_seed(0)
    model = Model()
    options = {"report_to": [], "max_steps": 4, "save_strategy": "no", "learning_rate": 0.1, "use_cpu": True}
    rows = [{"x": torch.ones(2) * 0.1 * row, "labels": torch.ones(1)} for row in range(32)]
    arguments = package.TrainingArguments("out", **{**options, **more})
    trainer = package.Trainer(model, arguments, train_dataset=rows, callbacks=[Stop()])
    try:
        trainer.train()
    except KeyboardInterrupt:
        trainer.train()
    return model.layer.weight.detach(), trainer.optimizer.state_dict()["state"][0]["step"]
"""


def test_training_goes_on_after_one_that_was_interrupted_as_that_of_transformers(tmp_path: Path) -> None:
    check = (
        "found, expected = weights(with_fastps), weights(transformers)\n"
        "assert found[1] == expected[1] == 7 and torch.allclose(found[0], expected[0], atol=1e-6), (found, expected)\n"
    )
    ended = programs.run_text(INTERRUPTED + check, tmp_path, "alone")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_types_in_the_options_are_written_and_read_by_name(tmp_path: Path) -> None:
    import torch

    from fastps.integrations.transformers import TrainingArguments

    given = TrainingArguments(str(tmp_path), use_cpu=True, fastps_options={"push_dtype": torch.bfloat16, "nonfinite": "drop"})
    written = json.loads(given.to_json_string())["fastps_options"]
    assert written == {"push_dtype": "bfloat16", "nonfinite": "drop"}
    assert given.fastps_options["push_dtype"] is torch.bfloat16
    for options in (written, json.dumps(written)):
        assert TrainingArguments(str(tmp_path), use_cpu=True, fastps_options=options).fastps_options == given.fastps_options


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fp16": True}, "expected bf16=True or full precision, found fp16=True"),
    ({"fsdp": "full_shard"}, "FSDP shards or averages itself"),
    ({"deepspeed": "some.json"}, "DeepSpeed shards or averages itself"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size would restart one worker alone"),
    ({"ddp_backend": "nccl"}, "expected ddp_backend to be left out, found 'nccl'"),
    ({"ddp_find_unused_parameters": False}, "ddp_find_unused_parameters would have no effect"),
    ({"ddp_bucket_cap_mb": 25}, "ddp_bucket_cap_mb would have no effect"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED, ids=[next(iter(options)) for options, _ in REFUSED])
def test_arguments_that_cannot_go_together_are_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    from fastps.integrations.transformers import TrainingArguments

    with pytest.raises(UnsupportedError, match=sentence):
        TrainingArguments(str(tmp_path), use_cpu=True, **options)


def test_arguments_and_trainer_of_transformers_itself_are_refused(tmp_path: Path) -> None:
    import torch
    import transformers

    from fastps.integrations.transformers import Trainer, TrainingArguments

    model = torch.nn.Linear(2, 1)
    with pytest.raises(UnsupportedError, match=r"expected fastps\.integrations\.transformers\.TrainingArguments, found"):
        Trainer(model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    with pytest.raises(UsageError, match=r"expected fastps\.integrations\.transformers\.Trainer, without which"):
        transformers.Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))


def test_import_in_the_checkout_says_where_to_start_instead() -> None:
    words = [sys.executable, "-c", "from fastps.integrations.transformers import Trainer"]
    ended = programs.run(words, ROOT)
    assert ended.returncode != 0
    assert "as transformers does, start Python in another folder, or as `python -P`" in ended.stderr
    assert programs.run([words[0], "-P", *words[1:]], ROOT).returncode == 0


def test_gathers_of_tokens_at_every_step_are_refused_under_a_discipline_without_waits(tmp_path: Path) -> None:
    ended = programs.run_text(PROGRAM.replace("OPTIONS", "average_tokens_across_devices=True"), tmp_path, sync="asp")
    assert ended.returncode != 0
    assert "average_tokens_across_devices makes every step wait for all workers" in ended.stderr
