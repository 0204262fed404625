"""What an evaluator finds, writes, keeps and asks for; and that no trainer waits for it."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastps
from fastps.evaluation.loop import Evaluation
from fastps.evaluation.options import EvaluationOptions
from fastps.evaluation.rows import OWN, Row, RowsFile, metrics_of, read
from fastps.evaluation.script import functions_of
from tests.evaluation.judged import build_model, evaluate, step
from tests.support import processes
from tests.support.said import listen


def _job() -> str:
    return f"evaluation-{os.getpid()}"


def _rows(judge: Any = evaluate, job: str = "", end: threading.Event | None = None, **options: Any) -> Iterator[Row]:
    return Evaluation(lambda: build_model(1), judge, job or _job(), EvaluationOptions(**options), end=end).rows()


def _loss(model: Any) -> dict[str, Any]:
    return {"loss": model.weight}


def _losses(**options: Any) -> Iterator[Row]:
    """Rows of a model with one weight, which is its loss."""
    return Evaluation(lambda: torch.nn.Linear(1, 1, bias=False), _loss, _job(), EvaluationOptions(**options)).rows()


def _publish(publisher: fastps.Publisher, loss: float) -> int:
    return publisher.publish({"weight": torch.full((1, 1), loss)})


def _publisher(first_version: int = 0) -> fastps.Publisher:
    return fastps.Publisher(torch.nn.Linear(1, 1, bias=False), _job(), first_version=first_version)


def _figures(model: torch.nn.Module) -> dict[str, float]:
    return {name: value.item() for name, value in evaluate(model).items()}


def _train(job: str, sync: str, rank: int, workers: int) -> dict[int, dict[str, float]]:
    """What a worker finds at each version that it has."""
    model, generator = build_model(), torch.Generator().manual_seed(rank)
    torch.set_num_threads(1)
    inner, found = torch.optim.SGD(model.parameters(), lr=0.01), {}
    options: Any = {"job": job, "rank": rank, "workers": workers, "model": model}
    with fastps.DistributedOptimizer(inner, sync, **options) as optimizer:
        optimizer.wait_for_start()
        for _ in range(150):
            step(model, optimizer, generator)
            found[optimizer.worker.version] = _figures(model)
            time.sleep(0.002)  # so that the evaluator sees some of them
    return found


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_what_it_finds_is_what_worker_0_finds_at_the_same_version_to_the_bit(sync: str) -> None:
    job = _job()
    children = [processes.start(lambda rank=rank: _train(job, sync, rank, 2)) for rank in range(2)]  # type: ignore[misc]
    rows = list(_rows(job=job))
    found, _ = processes.results(children, 60)
    assert rows[-1]["version"] == (150 if sync == "bsp" else 300)
    common = [row for row in rows if row["version"] in found]
    if sync == "asp":  # there worker 0 may have a version of before its own last push, to which its buffers belong
        common = [row for row in common if row["batches"] == found[row["version"]]["batches"]]
    assert len(common) >= 10
    assert [metrics_of(row) for row in common] == [found[row["version"]] for row in common]
    assert len({row["average"] for row in common}) == len({row["loss"] for row in common}) == len(common)


def test_what_it_finds_is_what_the_publisher_had() -> None:
    model, generator = build_model(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastps.Publisher(model, _job()) as publisher:
        rows = _rows()
        assert next(rows)["version"] == 0
        for number in range(1, 30):
            step(model, optimizer, generator)
            model.average.mul_(0.9)  # after the step, as averages of weights are
            publisher.publish(tag={"step": number})
            row = next(rows)
            assert (row["version"], row["tag"]) == (number, {"step": number}) and metrics_of(row) == _figures(model)
    assert list(rows) == []


def test_a_version_is_evaluated_once_it_is_far_enough_ahead_and_the_last_always() -> None:
    with _publisher() as publisher:
        rows = _losses(every=10)
        found = [next(rows)["version"]]
        for _ in range(3):
            for _ in range(14):
                _publish(publisher, 1.0)
            found.append(next(rows)["version"])
        _publish(publisher, 1.0)
    assert [*found, *(row["version"] for row in rows)] == [0, 14, 28, 42, 43]


def test_evaluations_begin_no_sooner_than_told_but_for_the_last() -> None:
    with _publisher() as publisher:
        rows = _losses(every_s=0.3)
        next(rows)
        began = time.monotonic()
        for _ in range(2):
            _publish(publisher, 1.0)
            next(rows)
        assert time.monotonic() - began >= 0.6 - 0.02
        rows = _losses(every_s=1000)
        next(rows)
        _publish(publisher, 1.0)
    assert [row["version"] for row in rows] == [3]


def test_training_is_asked_to_stop_once_patience_has_run_out(tmp_path: Path) -> None:
    losses = [3.0, 2.0, 2.5, float("nan"), 1.0, 1.0, 1.5, 1.2, 1.1]
    with _publisher() as publisher:
        rows = _losses(metric="loss", mode="min", patience=3, rows=str(tmp_path / "rows"))
        asked = []
        for loss in losses:
            _publish(publisher, loss)
            row = next(rows)
            asked.append(publisher.stop_asked)
            assert row.get("is_stop_asked", False) == publisher.stop_asked
    assert asked == [False] * 7 + [True] * 2
    found = read(tmp_path / "rows")[0]
    assert [row["is_best"] for row in found] == [True, True, False, False, True, False, False, False, False]
    assert found[3]["loss"] is None and metrics_of(found[3])["loss"] != metrics_of(found[3])["loss"], "NaN"


@pytest.mark.parametrize(("mode", "best"), [("max", 4.0), ("min", -2.0)])
def test_the_best_version_is_kept_as_torch_saves_it(mode: str, best: float, tmp_path: Path) -> None:
    file = tmp_path / "best.pt"
    with _publisher() as publisher:
        rows = _losses(metric="loss", mode=mode, best=str(file))
        for loss in (1.0, 4.0, -2.0, 3.0):
            _publish(publisher, loss)
            next(rows)
    assert torch.load(file) == {"weight": torch.full((1, 1), best)}
    assert [each.name for each in tmp_path.iterdir()] == ["best.pt"]
    assert file.stat().st_size < 10_000, "not the memory of all tensors for each"


@pytest.mark.slow
def test_it_follows_a_trainer_that_begins_anew_and_ends_without_one(tmp_path: Path) -> None:
    with _publisher() as publisher:
        _publish(publisher, 1.0)
        rows = _losses(follow_s=2)
        found = [next(rows)["version"]]
        _publish(publisher, 1.0)
    found.append(next(rows)["version"])
    for first_version in (2, 0):
        with _publisher(first_version) as publisher:
            _publish(publisher, 1.0)
            _publish(publisher, 1.0)
            found.append(next(rows)["version"])
    assert found == [1, 2, 4, 2], "an older version is another training's"
    began = time.monotonic()
    assert list(rows) == []
    assert time.monotonic() - began >= 1.5


def test_it_goes_on_with_rows_and_their_best_or_begins_anew(tmp_path: Path) -> None:
    file, best = tmp_path / "rows", tmp_path / "best"
    options: dict[str, Any] = {"metric": "loss", "mode": "min", "rows": str(file), "best": str(best)}
    with _publisher() as publisher:
        _publish(publisher, 1.0)
        next(_losses(**options))
        with file.open("a") as stream:
            stream.write('{"version": 7, "lo')  # cut short by a kill
        _publish(publisher, 2.0)
        next(_losses(**options, resume=True))
        assert [row["loss"] for row in read(file)[0]] == [1.0, 2.0] and file.read_text().endswith("\n")
        assert torch.load(best)["weight"].item() == 1.0
        next(_losses(**options))
        assert [row["loss"] for row in read(file)[0]] == [2.0] and torch.load(best)["weight"].item() == 2.0


def test_it_ends_once_told_with_the_newest_version() -> None:
    end = threading.Event()
    with fastps.Publisher(build_model(), _job()) as publisher:
        rows = _rows(end=end, every=100)
        assert next(rows)["version"] == 0
        publisher.publish()
        end.set()
        assert [row["version"] for row in rows] == [1]
    said = listen()
    assert list(_rows(end=end)) == [], "there is no job any more"
    assert any(each.startswith("nothing was evaluated: job ") for each in said)


def test_it_says_what_it_waits_for_and_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    said = listen()
    monkeypatch.setenv("FASTPS_TIMEOUT", "1.5")
    with pytest.raises(fastps.AttachError, match="expected an answer from its creator"):
        next(_rows())
    assert sum(each.startswith("this evaluator waits up to 1.5 s: job ") for each in said) == 1


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"every": 0}, "every: expected 1 version or more, found 0"),
    ({"every_s": -1}, "every_s: expected 0 to 1e9 seconds, found -1"),
    ({"patience": -1}, r"patience: expected 0 \(none\) or more evaluations, found -1"),
    ({"metric": "loss", "mode": "least"}, "mode: expected max or min, found 'least'"),
    ({"best": "x"}, r"best: expected metric and mode \(max or min\)"),
    ({"best": "x", "patience": 2, "metric": "loss"}, "best and patience: expected metric and mode"),
    ({"resume": True}, "resume: expected rows beside it"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fastps.UsageError, match=sentence):
        EvaluationOptions(**options)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (3, "expected a dict of numbers by name, found int"),
        ({"loss": "low"}, "found 'loss': str"),
        ({"loss": torch.ones(2)}, "found 'loss': Tensor"),
        ({"version": 3}, "found 'version': int"),
        ({"accuracy": 1, "top5": 2}, r"metric 'loss': expected it in what evaluate\(\) returns, found accuracy, top5"),
    ],
)
def test_what_is_no_row_is_refused(found: Any, sentence: str) -> None:
    with fastps.Publisher(build_model(), _job()), pytest.raises(fastps.UsageError, match=sentence):
        next(_rows(lambda model: found, metric="loss", mode="min"))


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with _publisher():
        with pytest.raises(fastps.UsageError, match=r"rows .*: expected a file that can be written, found: Is a directory"):
            next(_losses(rows=str(tmp_path)))
        with pytest.raises(fastps.UsageError, match=r"best .*: expected a file that can be written, found: No such file"):
            next(_losses(best=str(tmp_path / "none" / "best.pt"), metric="loss", mode="min"))
    (tmp_path / "other").write_text("a\n")
    with pytest.raises(fastps.UsageError, match=r"expected rows that an evaluator wrote, found b'a'"):
        RowsFile(str(tmp_path / "other"), resume=True)
    with pytest.raises(fastps.UsageError, match=r"expected a torch\.nn\.Module, found int"):
        next(Evaluation(lambda: 3, evaluate, _job(), EvaluationOptions()).rows())  # type: ignore[arg-type,return-value]


def test_a_scripts_functions_are_found_without_its_main_part(tmp_path: Path) -> None:
    script = tmp_path / "a-script.py"
    text = "import helper_of_script\ndef build(): return helper_of_script.X\nif __name__ == '__main__': raise SystemExit(3)\n"
    script.write_text(text)
    (tmp_path / "helper_of_script.py").write_text("X = 4\n")
    (build,) = functions_of(script, ["build"])
    assert build() == 4
    with pytest.raises(fastps.UsageError, match="expected a function judge, found none"):
        functions_of(script, ["build", "judge"])
    with pytest.raises(fastps.UsageError, match="found no file"):
        functions_of(tmp_path / "none.py", [])
    trains = tmp_path / "trains.py"
    trains.write_text(
        "import torch, fastps\nw = torch.ones(1, requires_grad=True)\nfastps.DistributedOptimizer(torch.optim.SGD([w]))\n"
    )
    with pytest.raises(fastps.UsageError, match=r"trains\.py trains when it is imported for its functions"):
        functions_of(trains, [])


def _evaluate_for_ever(job: str, folder: Path, ready: Callable[[], object]) -> None:
    options: dict[str, Any] = {"rows": str(folder / "rows"), "best": str(folder / "best"), "metric": "batches", "mode": "max"}
    for _ in _rows(job=job, **options):
        ready()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(12))
def test_a_killed_evaluator_leaves_whole_files(seed: int, tmp_path: Path) -> None:
    """Each version is the best so far, so both files are written all the time."""
    job, model, generator = f"{_job()}-{seed}", build_model(), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with fastps.Publisher(model, job) as publisher:
        child = processes.start_ready(lambda ready: _evaluate_for_ever(job, tmp_path, ready))
        end = time.monotonic() + 0.3 * float(torch.rand((), generator=generator))
        while time.monotonic() < end:
            step(model, optimizer, generator)
            publisher.publish()
        processes.kill(child)
        publisher.publish()
    rows, size = read(tmp_path / "rows")
    assert rows and all(row["is_best"] and len(metrics_of(row)) == 3 for row in rows)
    assert 0 <= (tmp_path / "rows").stat().st_size - size < 500, "at most one line that was cut short"
    state = torch.load(tmp_path / "best")
    assert state["norm.num_batches_tracked"].item() >= rows[-1]["batches"]
    build_model().load_state_dict(state)


@pytest.mark.parametrize("way", ["bsp", "publisher"])
def test_a_stopped_evaluator_holds_nobody_up_and_goes_on_with_the_newest_version(way: str) -> None:
    job, model, generator = _job(), build_model(), torch.Generator().manual_seed(2)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer: Any = fastps.Publisher(model, job) if way == "publisher" else None
    trainer = trainer or fastps.DistributedOptimizer(inner, "bsp", model=model, job=job, workers=1, rank=0)

    def evaluate_all(ready: Callable[[], object]) -> list[Row]:
        rows = []
        for row in _rows(job=job):
            rows.append(row)
            ready()
        return rows

    with trainer:
        child = processes.start_ready(evaluate_all)
        with processes.stopped(child.process_id):
            for _ in range(300):
                step(model, inner if way == "publisher" else trainer, generator)
                if way == "publisher":
                    trainer.publish()
            last = trainer.version
            assert last == 300
        expected = _figures(model)
    (rows,) = processes.results([child], 60)
    assert rows[-1]["version"] == last and metrics_of(rows[-1]) == expected
    assert len(rows) < 30, "it was stopped"


def test_rows_go_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra fastps[tensorboard] is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with _publisher() as publisher:
        rows = _losses(tensorboard=str(tmp_path))
        for loss in (3.0, 2.0):
            _publish(publisher, loss)
            next(rows)
    assert list(rows) == []
    events = EventAccumulator(str(tmp_path / "evaluation"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [(1, 3.0), (2, 2.0)]


def test_a_row_is_one_line_of_json(tmp_path: Path) -> None:
    file = RowsFile(str(tmp_path / "rows"), resume=False)
    file.add({"version": 1, "loss": float("inf"), "tag": {"a": "é\n"}})
    file.close()
    assert json.loads((tmp_path / "rows").read_text()) == {"version": 1, "loss": None, "tag": {"a": "é\n"}}
    assert "version" in OWN and read(tmp_path / "none") == ([], 0)
