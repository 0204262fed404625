"""Callbacks of Lightning and of transformers: what they publish, what comes back into the logs, and when the training stops."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.evaluation.loop import Evaluation
from fastps.evaluation.options import EvaluationOptions
from fastps.evaluation.rows import Row, metrics_of, read
from fastps.integrations.publishing import Publishing
from tests.clients.programs import needs
from tests.support import processes


def _job() -> str:
    return f"publishing-{os.getpid()}"


def _evaluate_all(build: Any, job: str, rows: Path, **options: Any) -> processes.Child:
    """Evaluate in a child until the job ends; its outcome are the rows."""

    def judge(model: torch.nn.Module) -> dict[str, float]:
        return {"weight": float(next(model.parameters()).double().sum())}

    given = EvaluationOptions(rows=str(rows), **options)
    return processes.start(lambda: list(Evaluation(build, judge, job, given).rows()))


def test_the_first_process_publishes_each_kth_step_and_the_last(tmp_path: Path) -> None:
    model, rows = torch.nn.Linear(2, 1), tmp_path / "rows"
    rows.write_text('{"version": 9, "unix_s": 1.0}\n')  # of a training before
    publishing = Publishing(_job(), 3, rows)
    publishing.begin(model, 6, is_first=True)
    with fastps.reader(_job()) as reader:
        assert reader.update() == 2
        found = [publishing.after_step(step, a=1) for step in (6, 7, 8, 9, 9)]
        assert reader.update() == 3 and reader.tag == {"step": 9, "a": 1}
        assert found == [([], False)] * 5
        reader.ask_to_stop()
        row = {"version": 3, "unix_s": time.time(), "loss": 0.5}
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        assert publishing.after_step(12) == ([row], True) and publishing.after_step(15) == ([], True)
        assert publishing.finish(16) == [] and reader.update() == 6 and reader.over
    publishing.begin(model, 0, is_first=False)
    assert publishing.after_step(3) == ([], False) and publishing.finish(4) == []


# -- Lightning ----------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Any:
    needs("lightning")
    from tests.integrations import lightning_modules

    return lightning_modules


class _Logger:
    """What a Trainer's loggers get."""

    def __init__(self) -> None:
        from lightning.pytorch.loggers import CSVLogger

        logged: list[tuple[int, dict[str, float]]] = []

        class Kept(CSVLogger):
            def log_metrics(self, metrics: Any, step: Any = None) -> None:
                logged.append((step, dict(metrics)))

        self.logged, self.kind = logged, Kept


def test_lightning_publishes_logs_and_stops(lines: Any, tmp_path: Path) -> None:
    from fastps.integrations.lightning import PublishCallback

    rows, kept = tmp_path / "rows", _Logger()
    child = _evaluate_all(lines.Line, _job(), rows, metric="weight", mode="min", patience=2)
    module = lines.Line()
    callback = PublishCallback(_job(), every=2, rows=rows)
    seen: dict[int, float] = {}
    counts: list[float] = []

    class Slow(callback.__class__.__mro__[1]):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *rest: Any) -> None:
            time.sleep(0.02)
            seen[trainer.global_step] = float(module.net.weight.double().sum())
            counts.append(float(trainer.callback_metrics.get("eval_weight", 0.0)))

    trainer = lines.single(tmp_path, max_epochs=300, callbacks=[callback, Slow()], logger=kept.kind(tmp_path))
    trainer.fit(module, lines.loader())
    (found,) = processes.results([child], 60)
    assert trainer.global_step < 300 * 16 and trainer.should_stop
    assert any(row.get("is_stop_asked") for row in found)
    _check_rows(found, seen, trainer.global_step)
    logged = {step: metrics["eval_weight"] for step, metrics in kept.logged if "eval_weight" in metrics}
    of_rows = {row["tag"]["step"]: row["weight"] for row in found if "tag" in row}
    assert logged and logged.items() <= {0: found[0]["weight"], **of_rows}.items()
    assert counts[-1] in [pytest.approx(row["weight"], rel=1e-6) for row in found], "callback_metrics are float32"


def _check_rows(found: list[Row], seen: dict[int, float], last: int) -> None:
    """Each row is what the trainer itself had after that step, to the bit."""
    tagged = [row for row in found if "tag" in row]
    assert tagged[-1]["tag"]["step"] == last
    assert [metrics_of(row)["weight"] for row in tagged] == [seen[row["tag"]["step"]] for row in tagged]


def test_lightning_that_fails_ends_the_job(lines: Any, tmp_path: Path) -> None:
    from fastps.integrations.lightning import PublishCallback

    class Fails(lines.Line):  # type: ignore[misc,name-defined]
        def training_step(self, batch: Any, index: int) -> Any:
            raise LookupError

    with pytest.raises(LookupError):
        lines.single(tmp_path, callbacks=[PublishCallback(_job())]).fit(Fails(), lines.loader())
    with pytest.raises(fastps.AttachError):
        fastps.reader(_job(), timeout_s=0)


# -- transformers -------------------------------------------------------------------------------------


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


def test_transformers_publishes_logs_and_stops(tmp_path: Path) -> None:
    needs("accelerate", "transformers")
    import transformers

    from fastps.integrations.transformers import PublishCallback

    rows, seen = tmp_path / "rows", dict[int, float]()
    child = _evaluate_all(_Model, _job(), rows, metric="weight", mode="min", patience=2)

    class Slow(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            time.sleep(0.02)
            seen[state.global_step] = float(parts["model"].layer.weight.double().sum())

    data = [{"x": torch.ones(2) * 0.1 * row, "labels": torch.ones(1)} for row in range(32)]
    options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    given = transformers.TrainingArguments(str(tmp_path), max_steps=5000, learning_rate=0.01, **options)
    trainer = transformers.Trainer(_Model(), given, train_dataset=data, callbacks=[Slow()])
    trainer.add_callback(PublishCallback(trainer, _job(), every=2, rows=rows))
    trainer.train()
    (found,) = processes.results([child], 60)
    assert trainer.state.global_step < 5000 and any(row.get("is_stop_asked") for row in found)
    _check_rows(found, seen, trainer.state.global_step)
    logged = {entry["eval_of_step"]: entry["eval_weight"] for entry in trainer.state.log_history if "eval_weight" in entry}
    of_rows = {row["tag"]["step"] if "tag" in row else row["version"]: row["weight"] for row in read(rows)[0]}
    assert logged and logged.items() <= of_rows.items()


# -- several processes --------------------------------------------------------------------------------


def test_processes_that_train_together_stop_at_the_same_step(tmp_path: Path) -> None:
    def train(rank: int) -> int:
        torch.distributed.init_process_group("gloo", f"file://{tmp_path}/meeting", rank=rank, world_size=2)
        publishing = Publishing(job, 2, "")
        publishing.begin(torch.nn.Linear(2, 1), 0, is_first=rank == 0)
        for step in range(1, 10_000):
            time.sleep(0.001)
            if publishing.after_step(step)[1]:
                break
        publishing.finish(step)
        torch.distributed.destroy_process_group()
        return step

    job = _job()
    children = processes.start_each(train, 2)
    with fastps.reader(job) as reader:
        reader.wait(10)
        reader.ask_to_stop()
    first, second = processes.results(children, 60)
    assert first == second < 9_999
