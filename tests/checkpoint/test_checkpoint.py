"""Checkpoints: what is saved comes back bit for bit, while others work; damaged and foreign ones are refused by name."""

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import fastps
from fastps.checkpoint import snapshot
from fastps.checkpoint.format import JSON_FILE, TENSORS_FILE, sealed
from fastps.store import jobs_of_process
from tests.support import commands, processes
from tests.support.torch_optimizers import one_worker, steps_on

WEIGHTS = {"w": np.linspace(-1, 1, 30, dtype=np.float32).reshape(5, 6), "b": np.ones(3, np.float32)}
UPDATES: dict[str, Any] = {
    "momentum": fastps.SGD(lr=0.1, momentum=0.9),
    "adam": fastps.Adam(lr=0.01),
    "rmsprop": fastps.RMSProp(lr=0.01, centered=True),
    "amsgrad": fastps.Adam(lr=0.01, amsgrad=True),
    "nadam": fastps.NAdam(lr=0.01),
    "radam": fastps.RAdam(lr=0.01, betas=(0.9, 0.8)),
    "adamax": fastps.Adamax(lr=0.01),
    "adadelta": fastps.Adadelta(lr=0.5),
}


def _gradient(rank: int, step: int) -> dict[str, np.ndarray[Any, Any]]:
    generator = np.random.default_rng([rank, step])
    return {name: generator.standard_normal(value.shape, np.float32) for name, value in WEIGHTS.items()}


def _work(store: fastps.Store, rank: int, until: int) -> Callable[[], None]:
    def work() -> None:
        with store.attach(rank) as worker:
            while worker.steps < until:
                worker.step(_gradient(rank, worker.steps))

    return work


def _state(store: fastps.Store) -> list[bytes]:
    weights, states = store.committed()
    planes = [view for plane in range(store.layout.planes) for view in store.plane_views(states, plane)]
    return [each.tobytes() for each in (*store.weight_views(weights), *planes, *store.rule_steps(states))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "sync"), [*((name, "bsp") for name in UPDATES), ("adam", "bsp,ema=0.9")])
def test_resuming_is_going_on_bit_for_bit(tmp_path: Path, name: str, sync: str) -> None:
    """Two workers stop at step 7 and go on from the checkpoint, or do not stop: the same bits."""
    with fastps.Store.create(WEIGHTS, UPDATES[name], sync=sync, workers=2) as store:
        processes.results([processes.start(_work(store, rank, 20)) for rank in range(2)], 20)
        expected = _state(store)
    with fastps.Store.create(WEIGHTS, UPDATES[name], sync=sync, workers=2) as store:
        other = processes.start(_work(store, 1, 8))  # its eighth push may wait in the sum, and is not in it
        with store.attach(0) as worker:
            for step in range(7):
                worker.step(_gradient(0, step))
            fastps.save(worker, tmp_path, extra={"seed": 3})
        processes.finish([other], 20)
    checkpoint = fastps.load(tmp_path)
    assert (checkpoint.version, checkpoint.description["clocks"], checkpoint.extra) == (7, [7, 7], {"seed": 3})
    with fastps.Store.create(WEIGHTS, UPDATES[name], sync=sync, workers=2, resume=checkpoint) as store:
        assert store.version == 7
        processes.results([processes.start(_work(store, rank, 20)) for rank in range(2)], 20)
        assert store.version == 20
        assert _state(store) == expected


@pytest.mark.parametrize("sync", ["asp", "ssp:2", "psp:1,0.5", "softsync:2"])
def test_a_version_is_whole_while_the_others_go_on(tmp_path: Path, sync: str) -> None:
    """With SGD and one constant gradient weights tell their version: no checkpoint mixes two, and nobody waits for one."""
    amount = np.float32(1 / 1024)
    weights = {"w": np.ones(200_000, np.float32), "b": np.ones(7, np.float32)}
    with fastps.Store.create(weights, fastps.SGD(lr=1.0, momentum=0.5), sync=sync, workers=2) as store:

        def busy() -> None:
            with store.attach(1) as worker:
                while True:
                    for view in worker.gradients.values():
                        view[...] = amount
                    worker.push(store.hypers)
                    worker.advance()
                    worker.pull()

        with store.attach(0) as worker:
            other = processes.start(busy)
            while store.arena.counters(1)["steps"] < 3:
                worker.step({name: np.full(value.shape, amount) for name, value in weights.items()})
            steps_meanwhile = 0
            for _ in range(4):
                before = store.arena.counters(1)["steps"]
                found = fastps.load(fastps.save(worker, tmp_path))
                for name in weights:
                    assert len(set(found.tensors[f"weights/{name}"].reshape(-1).tolist())) == 1
                    assert len(set(found.tensors[f"state/momentum_buffer/{name}"].reshape(-1).tolist())) == 1
                steps_meanwhile += store.arena.counters(1)["steps"] - before
                worker.step({name: np.full(value.shape, amount) for name, value in weights.items()})
            assert sync != "asp" or steps_meanwhile > 0
            os.kill(other.process_id, signal.SIGKILL)
            processes.finish([other], 10)
        assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["checkpoint-000003", "checkpoint-000004"]


def test_a_saver_that_dies_leaves_the_earlier_checkpoint_and_its_place(tmp_path: Path) -> None:
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0), sync="asp", workers=2, on_worker_loss="continue") as store:

        def die() -> None:
            with store.attach(1) as worker:
                fastps.save(worker, tmp_path)
                with contextlib.closing(snapshot.pin(worker, {})) as pinned:
                    (tmp_path / ".unfinished-2").mkdir()
                    assert pinned.description["version"] == 0
                    os.kill(os.getpid(), signal.SIGKILL)

        child = processes.start(die)
        processes.finish([child], 10)
        with store.attach(0) as worker:
            time.sleep(0.06)  # beyond the time between two looks
            worker.step(_gradient(0, 0))
            fastps.save(worker, tmp_path)
        assert sorted(folder.name for folder in tmp_path.iterdir()) == ["checkpoint-000001", "checkpoint-000002"]


def test_case_16_a_full_disk_leaves_the_earlier_checkpoint_and_training_goes_on(tmp_path: Path) -> None:
    def fill() -> str:
        with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
            fastps.save(worker, tmp_path)
            worker.step(_gradient(0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # what does not fit is an error of write
            try:
                fastps.save(worker, tmp_path)
            except fastps.CheckpointError as error:
                worker.step(_gradient(0, 1))
                return f"{error} version {store.version}"
            return "it was written"

    child = processes.start(fill)
    processes.finish([child], 20)
    assert "cannot be written" in str(child.outcome)
    assert str(child.outcome).endswith("the earlier checkpoints are unchanged version 2")
    assert [folder.name for folder in tmp_path.iterdir()] == ["checkpoint-000001"]
    assert fastps.load(tmp_path).version == 0


# -- refused by name ----------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0, momentum=0.5)) as store, store.attach(0) as worker:
        worker.step(_gradient(0, 0))
        return fastps.save(worker, tmp_path)


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    description = json.loads((folder / JSON_FILE).read_text())
    change(description)
    (folder / JSON_FILE).write_bytes(sealed(description))


@pytest.mark.parametrize(("change", "refusal"), [
    (lambda it: it.pop("version"), "field 'version': expected int, found nothing"),
    (lambda it: it.update(version="7"), "field 'version': expected int, found '7'"),
    (lambda it: it.update(version=-1), "field 'version': expected 0 to 2"),
    (lambda it: it.update(clocks=[1.5]), "field 'clocks': expected whole numbers"),
    (lambda it: it.update(format=99), "field 'format': expected 1 or 2, which this fastps reads, found 99"),
    (lambda it: it["parameters"][0].pop("shape"), "parameter 0: expected name, shape, group and steps"),
    (lambda it: it["parameters"][1].update(name="c"), "parameter 'c': tensor 'weights/c': expected float32.*no such tensor"),
    (lambda it: it["parameters"][0].update(steps=1 << 70), r"parameter 0: expected a group that is there and 0 to 2\^39 steps"),
    (lambda it: it["parameters"][1].update(group=1), "parameter 1: expected a group that is there"),
    (lambda it: it.update(param_groups=[7]), r"field 'param_groups': expected an object each, found \[7\]"),
    (lambda it: it["rule"].update(planes=["x"]), "parameter 'w': tensor 'state/x/w': expected float32 of shape"),
    (lambda it: it["checksums"].update({"weights/b": 1}), "tensor 'weights/b': expected the checksum 1, found"),
    (lambda it: it["checksums"].pop("weights/b"), "tensor 'weights/b': expected it in both files"),
])  # fmt: skip
def test_a_wrong_description_is_refused_by_field(saved: Path, change: Callable[[dict[str, Any]], object], refusal: str) -> None:
    _edit(saved, change)
    with pytest.raises(fastps.CheckpointError, match=refusal):
        fastps.load(saved)


def test_a_changed_number_without_the_digest_that_fits_is_refused(saved: Path) -> None:
    text = (saved / JSON_FILE).read_bytes()
    (saved / JSON_FILE).write_bytes(text.replace(b'"drawn": 0', b'"drawn": 7'))
    with pytest.raises(fastps.CheckpointError, match=r"checkpoint.json: expected the digest \w+, found \w+: it is damaged"):
        fastps.load(saved)


def test_a_checkpoint_of_the_format_before_is_read(saved: Path) -> None:
    description = json.loads((saved / JSON_FILE).read_text())
    old = {key: value for key, value in description.items() if key not in ("header", "digest")} | {"format": 1}
    (saved / JSON_FILE).write_text(json.dumps(old, indent=1))
    assert fastps.load(saved).version == 1


def _flip(file: Path) -> None:
    """Change the last byte: of a tensor, or of the digest."""
    content = bytearray(file.read_bytes())
    content[-1 if file.name == TENSORS_FILE else -5] ^= 1
    file.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_named_and_the_older_whole_one_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fastps.Store.create(WEIGHTS, fastps.SGD(lr=1.0)) as store, store.attach(0) as worker:
        folders = [fastps.save(worker, tmp_path)]
        worker.step(_gradient(0, 0))
        folders.append(fastps.save(worker, tmp_path))
    _flip(folders[1] / TENSORS_FILE)
    found = fastps.load(tmp_path)
    assert (found.version, found.folder) == (0, folders[0])
    assert "checkpoint-000002: tensor" in caplog.text
    assert f"the newest whole one is taken: {folders[0]}, version 0" in caplog.text
    with pytest.raises(fastps.CheckpointError, match="checkpoint-000002: tensor"):
        fastps.load(folders[1])  # which was asked for by its own name
    _flip(folders[0] / JSON_FILE)
    with pytest.raises(fastps.CheckpointError, match=r"found none: .*-000002: tensor .*; .*-000001: checkpoint.json"):
        fastps.load(tmp_path)


def test_a_truncated_file_is_refused(saved: Path) -> None:
    file = saved / TENSORS_FILE
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(fastps.CheckpointError, match="safetensors: expected a whole safetensors file, found a damaged"):
        fastps.load(saved)


def _flip_a_bit(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    tensors["state/momentum_buffer/w"].view(np.uint8).reshape(-1)[5] ^= 4


@pytest.mark.parametrize(("change", "refusal"), [
    (_flip_a_bit, r"tensor 'state/momentum_buffer/w': expected the checksum \d+, found \d+: it is"),
    (lambda it: it.update({"weights/w": np.zeros((6, 5), np.float32)}), r"parameter 'w'.* shape \[5, 6\], found .* \[6, 5\]"),
])  # fmt: skip
def test_other_tensors_are_refused_by_name(saved: Path, change: Callable[[dict[str, Any]], object], refusal: str) -> None:
    tensors = {name: array.copy() for name, array in load_file(saved / TENSORS_FILE).items()}
    change(tensors)
    save_file(tensors, saved / TENSORS_FILE)
    with pytest.raises(fastps.CheckpointError, match=refusal):
        fastps.load(saved)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(fastps.CheckpointError, match="folders checkpoint-NUMBER there, found neither"):
        fastps.load(tmp_path / "nowhere")


@pytest.mark.parametrize(("weights", "update", "refusal"), [
    ({**WEIGHTS, "b": np.ones(4, np.float32)}, fastps.SGD(1.0, 0.5), r"parameter 1: expected 'b' .* shape \[4\].*found 'b' of"),
    ({"w": WEIGHTS["w"]}, fastps.SGD(1.0, 0.5), "parameter 1: expected no such parameter as in this model, found 'b'"),
    (WEIGHTS, fastps.Adam(), "rule's name: expected 'adam' as in this optimizer, found 'sgd'"),
    (WEIGHTS, fastps.SGD(1.0), r"rule's planes: expected \[\] as in this optimizer, found \['momentum_buffer'\]"),
])  # fmt: skip
def test_another_models_checkpoint_is_refused_by_name(saved: Path, weights: Any, update: Any, refusal: str) -> None:
    with pytest.raises(fastps.CheckpointError, match=refusal):
        fastps.Store.create(weights, update, resume=fastps.load(saved))


# -- torch ------------------------------------------------------------------------------------------------


def _model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 1))


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        inputs, targets = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(step))
        steps_on(model, optimizer, inputs, loss=partial(torch.nn.functional.mse_loss, target=targets[:, :1]))


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_checkpoint_goes_on_in_fastps_and_in_plain_torch(tmp_path: Path, name: str) -> None:
    make = MAKERS[name]
    with one_worker(_model(), make, named=True, checkpoint=tmp_path, every=5) as (model, optimizer):
        _train(model, optimizer, 0, 5)
        optimizer.param_groups[0]["lr"] = np.float32(2**-6)  # as of a schedule in NumPy
        _train(model, optimizer, 5, 10)
    checkpoint = fastps.load(tmp_path)
    assert checkpoint.version == 10
    plain = _model()
    with one_worker(_model(), make, named=True, resume=tmp_path) as (with_fastps, optimizer):
        assert optimizer.version == 10 and optimizer.param_groups[0]["lr"] == 2**-6
        _train(with_fastps, optimizer, 10, 15)
    saved = {**checkpoint.weights(), **checkpoint.buffers()}
    plain.load_state_dict({key: torch.from_numpy(value.copy()) for key, value in saved.items()})
    torch_optimizer = make(plain.parameters())
    torch_optimizer.load_state_dict(fastps.optimizer_state_dict(checkpoint))
    _train(plain, torch_optimizer, 10, 15)
    for (key, ours), theirs in zip(with_fastps.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6), key


def test_parameters_that_torch_gives_one_name_are_all_in_a_checkpoint(tmp_path: Path) -> None:
    def wrapped(seed: int, **options: Any) -> tuple[list[torch.nn.Parameter], fastps.DistributedOptimizer]:
        torch.manual_seed(seed)
        others, model = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        inner = torch.optim.Adam([*others.named_parameters(), *model.named_parameters()])
        return [*others.parameters(), *model.parameters()], fastps.DistributedOptimizer(inner, model=model, **options)

    tensors, optimizer = wrapped(0)
    with optimizer:
        fastps.save(optimizer, tmp_path)
    saved = fastps.load(tmp_path).weights()
    names = ["param_groups[0][0]", "param_groups[0][1]", "weight", "bias"]
    assert [torch.tensor(saved[name]).tolist() for name in names] == [tensor.tolist() for tensor in tensors]
    resumed, optimizer = wrapped(1, resume=tmp_path)
    with optimizer:
        assert [tensor.tolist() for tensor in resumed] == [tensor.tolist() for tensor in tensors]


def test_each_optimizer_of_a_script_has_a_folder_and_goes_on_with_its_own_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(first: float, second: float) -> list[tuple[int, list[float]]]:
        """Two optimizers at once, as a GAN has them: the version and the weights with which each begins."""
        monkeypatch.setattr(jobs_of_process, "_next", [0])
        models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
        for model, value in zip(models, (first, second), strict=True):
            torch.nn.init.constant_(model.weight, value)
        with contextlib.ExitStack() as stack:
            optimizers = [
                stack.enter_context(fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model=model))
                for model in models
            ]
            found = [(each.version, model.weight.flatten().tolist()) for each, model in zip(optimizers, models, strict=True)]
            for _ in range(3):
                for model, optimizer in zip(models, optimizers, strict=True):
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()
        return found

    monkeypatch.setenv("FASTPS_RUN", "4711")
    monkeypatch.setenv("FASTPS_CHECKPOINT", str(tmp_path))
    trained(1.0, 2.0)
    monkeypatch.delenv("FASTPS_CHECKPOINT")
    for given in (tmp_path, tmp_path / "checkpoint-000001"):  # the launcher gives the newest checkpoint
        monkeypatch.setenv("FASTPS_RESUME", str(given))
        assert trained(0.0, 0.0) == [(3, [1.0, 1.0]), (3, [2.0, 2.0])]
    (tmp_path / "optimizer1").rename(tmp_path / "elsewhere")
    with pytest.raises(fastps.CheckpointError, match=r'number 1 in .*optimizer1, found no such folder; .* resume="" to begin'):
        trained(0.0, 0.0)


def test_an_optimizer_that_the_resumed_run_did_not_reach_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The script trains one model after the other, as for a pretraining and a fine-tuning."""

    def stage(**arguments: Any) -> tuple[int, list[float]]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(model.weight, 1.0)
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model, **arguments) as optimizer:
            found = optimizer.version, model.weight.flatten().tolist()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return found

    monkeypatch.setattr(jobs_of_process, "_next", [0])
    stage(checkpoint=tmp_path)
    monkeypatch.setattr(jobs_of_process, "_next", [0])
    monkeypatch.setenv("FASTPS_RESUME", str(tmp_path))
    assert [stage() for _ in range(2)] == [(1, [0.5, 0.5]), (0, [1.0, 1.0])]
    assert "no checkpoint of the script's optimizer number 1, which begins anew" in caplog.text


def test_checkpoints_every_so_many_updates_and_a_failure_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with one_worker(_model(), MAKERS["sgd"], checkpoint=folder, every=2) as (model, optimizer):
        folder.rmdir()
        folder.write_text("not a directory any more")
        checkpointing: Any = optimizer._job.checkpointing
        for first, last in ((0, 3), (3, 5)):
            _train(model, optimizer, first, last)
            checkpointing._join()
        assert (checkpointing.written, checkpointing.failures) == (0, 2)
        assert optimizer.version == 5


@pytest.mark.slow
def test_the_example_that_resumes_ends_with_the_same_bits(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "resume.py"

    def run(*options: str) -> list[str]:
        ended = commands.fastps("run", "-n", "2", *options, str(example), "60")
        assert ended.returncode == 0, ended.stderr
        return sorted(ended.stdout.splitlines())

    whole = run("--checkpoint", str(tmp_path), "--every", "20")
    before, _ = sorted(tmp_path.iterdir())  # the last has the end's version
    resumed = run("--resume", str(before))
    begun = fastps.load(before).version
    assert 20 <= begun < 60
    going_on = [f"[{rank}] worker {rank} goes on at step {begun}, version {begun}" for rank in range(2)]
    assert resumed == sorted([*whole, *going_on])
