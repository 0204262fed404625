"""What programs do that were written for something else: it works, or one sentence says what was found and what to do."""

import contextlib
import copy
import importlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastps
from fastps.cli import top
from fastps.processes.launcher import Launcher
from fastps.processes.worker_environment import environment_of, style_of
from fastps.store import jobs_of_process
from tests.support import processes
from tests.support.said import listen
from tests.support.scripts import modules_of, program
from tests.support.torch_optimizers import steps_on


def _model(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 1)


def _wrap(of: torch.nn.Module, **options: Any) -> fastps.DistributedOptimizer:
    return fastps.DistributedOptimizer(torch.optim.SGD(of.parameters(), lr=0.01), **options)


def _train(model: torch.nn.Module, optimizer: Any, steps: int) -> None:
    steps_on(model, optimizer, torch.ones(2, 4), steps)


def _in_processes(work: Callable[[int], Any], workers: int, start: Any = processes.start_job) -> list[Any]:
    """What `work(rank)` returns in forked workers of a job, or the exception's name and text."""
    children = start(work, workers)
    processes.finish(children, 60)
    return [child.outcome for child in children]


# -- processes that no launcher started ------------------------------------------------------------


def _of_multiprocessing(work: Callable[[int], Any], count: int) -> list[Any]:
    """What `work(number)` returns in children that multiprocessing starts."""
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    children = [context.Process(target=lambda number=number: told.put(work(number))) for number in range(count)]
    for child in children:
        child.start()
    found = [told.get() for _ in children]
    for child in children:
        child.join()
    return found


def test_child_of_multiprocessing_that_nobody_told_its_rank_is_refused() -> None:
    def work(_: int) -> str:
        with pytest.raises(fastps.Error) as refused:
            _wrap(_model())
        return str(refused.value)

    (text,) = _of_multiprocessing(work, 1)
    assert "started by multiprocessing" in text
    assert "fastps.spawn(fn, args, workers=N)" in text


def test_workers_that_say_their_job_rank_and_number_train_together() -> None:
    def work(rank: int) -> tuple[int, list[float]]:
        model = _model(rank)
        with _wrap(model, job=f"named-{os.getppid()}", rank=rank, workers=2) as optimizer:
            _train(model, optimizer, 5)
            optimizer.wait_for_others()
            return optimizer.version, model.weight.flatten().tolist()

    first, second = _of_multiprocessing(work, 2)
    assert first == second
    assert first[0] == 5


def test_parameters_in_memory_that_torch_shares_are_refused_by_name() -> None:
    model = _model().share_memory()
    with pytest.raises(fastps.UnsupportedError, match=r"share_memory.*fastps\.spawn.*model=model"):
        _wrap(model)
    private = copy.deepcopy(model)
    _wrap(private).close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_worker_is_neither_copied_nor_pickled(copied: Callable[[Any], Any]) -> None:
    with _wrap(_model()) as optimizer:
        with pytest.raises(fastps.UsageError, match="cannot be copied or pickled, because it is a worker of a job"):
            copied(optimizer)


@pytest.mark.parametrize(("said", "sentence"), [
    ({"rank": 1}, "rank= and workers= together"),
    ({"job": "a", "rank": 2, "workers": 2}, "rank from 0 to the number of workers"),
    ({"rank": 0, "workers": 2}, "needs job="),
])  # fmt: skip
def test_half_of_what_a_worker_has_to_say_is_refused(said: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fastps.UsageError, match=sentence):
        _wrap(_model(), **said)


def test_number_of_workers_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(fastps.UsageError, match="not which one this is"):
        _wrap(_model())


@contextlib.contextmanager
def _met(folder: Path, rank: int) -> Iterator[None]:
    """Inside a process group of two. A rank that ended before the other is connected would fail it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.distributed.barrier()
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def test_process_group_numbers_a_worker_that_no_variable_does(tmp_path: Path) -> None:
    def work(rank: int) -> tuple[int, int]:
        with _met(tmp_path, rank):
            return fastps.rank(), fastps.world_size()

    assert _in_processes(work, 2, processes.start_each) == [(0, 2), (1, 2)]


@pytest.mark.slow
def test_script_that_runs_again_in_a_spawned_child_is_told_to_guard_itself(tmp_path: Path) -> None:
    text = (
        "import fastps, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "data = torch.utils.data.TensorDataset(torch.ones(8, 4))\n"
        "loader = torch.utils.data.DataLoader(data, num_workers=1, multiprocessing_context='spawn')\n"
        "for (inputs,) in loader:\n    pass\n"
    )
    ended = subprocess.run(program(tmp_path, text), capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "guard your script" in ended.stderr
    assert "expected a new name" not in ended.stderr


# -- what launched workers see ---------------------------------------------------------------------


def test_workers_see_torchruns_variables_only_where_the_script_asks_for_them(tmp_path: Path) -> None:
    plain = program(tmp_path, "import accelerate\n", "plain.py")
    asking = program(tmp_path, "import os\nprint(os.environ['RANK'])\n", "asking.py")
    assert style_of("auto", plain) == "fastps"
    assert style_of("auto", [*asking, "--rank"]) == "torchrun"
    assert style_of("auto", [sys.executable, "-u", asking[1], "-m", "nothing"]) == "torchrun"
    assert style_of("auto", [*plain, asking[1]]) == "fastps", "what is given to a script is not the script"
    assert style_of("torchrun", plain) == "torchrun"
    with pytest.raises(fastps.UsageError, match="--env"):
        style_of("slurm", plain)
    outer = {"RANK": "7", "WORLD_SIZE": "9", "MASTER_PORT": "1"}
    seen = environment_of(1, 2, 5, "job", None, outer)
    assert not [name for name in outer if name in seen], "a library would join what is around"
    assert (seen["FASTPS_RANK"], seen["FASTPS_WORKERS"], seen["FASTPS_JOB"]) == ("1", "2", "job")
    both = environment_of(1, 2, 5, "job", None, outer, style="torchrun")
    assert (both["RANK"], both["WORLD_SIZE"], both["FASTPS_RANK"]) == ("1", "2", "1")


@pytest.mark.slow
def test_launched_script_finds_its_rank_without_torchruns_variables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os, fastps\nprint(fastps.rank(), fastps.world_size(), 'RA' + 'NK' in os.environ)\n"
    assert Launcher(program(tmp_path, text), 2).run().exit_code == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] 0 2 False", "[1] 1 2 False"]


def _in_ddp(wraps_first: bool, rank: int, folder: Path) -> None:
    with _met(folder, rank):
        model = _model()
        averaging = torch.nn.parallel.DistributedDataParallel(model) if not wraps_first else None
        with contextlib.closing(_wrap(model, sync="asp")) as optimizer:
            averaging = averaging or torch.nn.parallel.DistributedDataParallel(model)
            averaging(torch.ones(2, 4)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("wraps_first", [True, False])
def test_model_inside_ddp_is_refused_by_name_before_a_gradient_counts_twice(wraps_first: bool, tmp_path: Path) -> None:
    for kind, sentence in _in_processes(lambda rank: _in_ddp(wraps_first, rank, tmp_path), 2):
        assert kind == "UnsupportedError"
        assert "inside DistributedDataParallel" in sentence
        assert "fastps run --env fastps" in sentence


@pytest.mark.parametrize("kind", ["fully_shard", "flat", "original"])
def test_model_that_is_sharded_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def work(rank: int) -> None:
        with _met(tmp_path, rank):
            model: torch.nn.Module = _model()
            if kind == "fully_shard":
                fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
            else:
                model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=kind == "original")
            _wrap(model).close()

    for name, sentence in _in_processes(work, 2):
        assert name == "UnsupportedError", sentence
        assert "fully_shard" in sentence or "FullyShardedDataParallel" in sentence


def test_process_group_that_averages_nothing_is_no_obstacle(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        with _met(tmp_path, rank), _wrap(model := _model()) as optimizer:
            _train(model, optimizer, 3)
        return optimizer.version

    assert _in_processes(work, 2) == [3, 3]


# -- strangers, and jobs of one launch -------------------------------------------------------------


def test_optimizers_that_are_counted_otherwise_meet_in_the_job_that_expects_them() -> None:

    def work(rank: int) -> tuple[bool, int]:
        jobs_of_process._next = [3 * rank]  # this process has made as many before
        model = _model()
        with _wrap(model, timeout_s=20) as optimizer:
            _train(model, optimizer, 4)
        return optimizer.worker.store.job == os.environ["FASTPS_JOB"], jobs_of_process.count_next()

    assert _in_processes(work, 2) == [(True, 1)] * 2


def test_worker_that_finds_nobody_says_what_it_looked_for_and_what_is_there() -> None:
    with fastps.Store.create({"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), job=f"there-{os.getpid()}"):
        with pytest.raises(fastps.AttachError, match=rf"job absent: .*may still prepare.*job=.*there-{os.getpid()}"):
            _wrap(_model(), job="absent", rank=1, workers=2, timeout_s=0.2)


# -- errors, readers, weights ----------------------------------------------------------------------


def _errors() -> list[type[fastps.Error]]:
    for name in modules_of(fastps):
        if not name.startswith(("fastps.kernels", "fastps.integrations")):  # frameworks take seconds to import
            importlib.import_module(name)
    found, new = {fastps.Error}, [fastps.Error]
    while new:
        new = [sub for kind in new for sub in kind.__subclasses__() if sub not in found]
        found.update(new)
    return sorted((kind for kind in found if kind.__module__.startswith("fastps")), key=lambda kind: kind.__name__)


def test_every_error_survives_pickle_and_copy() -> None:
    kinds = _errors()
    assert {fastps.WorkerDiedError, fastps.NonFiniteGradientError, top.NoJobError} <= set(kinds)
    for kind in kinds:
        error = kind.__new__(kind)  # whatever its constructor takes
        error.args, error.__dict__["worker"] = ("what was found",), 7
        error.add_note("a note")
        for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(again) is kind
            assert (str(again), again.__dict__) == (str(error), error.__dict__), kind


def test_worker_that_only_pulls_is_refused_where_the_others_wait_for_it() -> None:
    with fastps.Store.create(
        {"w": np.ones(4, np.float32)}, fastps.SGD(lr=1.0), sync="ssp:3", workers=1, max_workers=2, timeout_s=20
    ) as store:

        def read() -> None:
            with store.attach(1) as reader:
                while True:
                    reader.pull()

        with store.attach(0) as worker:
            reader = processes.start(read)
            with contextlib.suppress(fastps.WorkerDiedError):  # the reader may be refused before the last step
                for _ in range(50):
                    worker.step({"w": np.zeros(4)})
            processes.finish([reader], 20)
    kind, sentence = reader.outcome
    assert kind == "UsageError"
    assert "worker 1 has pulled 17 times since its last push" in sentence


def test_a_step_that_was_replaced_before_wrapping_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    inner = torch.optim.SGD(_model().parameters(), lr=0.01)
    torch.optim.lr_scheduler.StepLR(inner, 1)  # replaces it, too, to count
    fastps.DistributedOptimizer(inner).close()
    assert "was replaced" not in caplog.text
    inner = torch.optim.SGD(_model().parameters(), lr=0.01)
    inner.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    fastps.DistributedOptimizer(inner).close()
    assert "step() of the torch optimizer was replaced by" in caplog.text


def test_an_optimizer_whose_parameters_another_has_says_so_at_its_next_step() -> None:
    model, head = _model(), _model()
    first = _wrap(model)
    with fastps.DistributedOptimizer(torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.01)):
        with pytest.raises(fastps.UsageError, match="two open optimizers cannot share some"):
            _train(model, first, 1)


@pytest.mark.parametrize("kind", ["complex", "left to torch", "wrapped, too", "frozen"])
def test_parameters_of_the_model_that_a_torch_optimizer_trains_are_told_of_at_the_first_step(kind: str) -> None:
    def work(rank: int) -> list[str]:
        found = listen()
        model = torch.nn.Linear(2, 1)
        dtype = torch.cfloat if kind == "complex" else torch.float32
        model.register_parameter("apart", torch.nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=kind != "frozen"))
        other: Any = torch.optim.SGD([model.apart], lr=0.1)
        inner = torch.optim.SGD([model.weight, model.bias], lr=0.1)
        with fastps.DistributedOptimizer(inner, model=model, timeout_s=30) as optimizer:
            if kind == "wrapped, too":
                other = fastps.DistributedOptimizer(other, model=model, timeout_s=30)
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            optimizer.wait_for_others()
        return [each for each in found if "does not wrap" in each]

    children = processes.start_job(work, 2)
    processes.finish(children, 60.0)
    for child in children:
        if kind in ("complex", "left to torch"):
            (said,) = child.outcome
            assert said.startswith("parameter 'apart' of the model is trained by an optimizer") and "view_as_real" in said
        else:
            assert child.outcome == []


@pytest.mark.usefixtures("loops")
def test_parameter_that_is_pointed_elsewhere_is_told_of() -> None:
    model = _model()
    with _wrap(model, model=model) as optimizer:
        _train(model, optimizer, 2)
        kept = model.weight.data
        for elsewhere in (torch.zeros(8)[:4].reshape(1, 4), torch.zeros(1, 4).double(), torch.zeros(4)):
            model.weight.data = elsewhere
            with pytest.raises(fastps.ParameterChangedError, match=r"'weight' was pointed.*a part of a larger tensor"):
                optimizer.step()
        model.weight.data = kept
        _train(model, optimizer, 1)
        model.share_memory()
        with pytest.raises(fastps.ParameterChangedError, match=r"'weight' was pointed.*share_memory.*unwrap\(\) first"):
            _train(model, optimizer, 1)


def test_weights_that_one_worker_replaces_are_everyones_and_no_update_is_lost() -> None:

    def work(rank: int) -> list[float]:
        model = _model()
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with fastps.DistributedOptimizer(inner, model=model) as optimizer:
            _train(model, optimizer, 3)
            if rank == 0:
                optimizer.replace_weights(lambda weights: [weight.clamp(-0.01, 0.01) for weight in weights])
                assert model.weight.abs().max() <= 0.01
            _train(model, optimizer, 2)
            momentum = [entry["momentum_buffer"].sum().item() for entry in optimizer.state_dict()["state"].values()]
            return [*model.weight.flatten().tolist(), *model.bias.tolist(), *momentum]

    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    _train(plain, optimizer, 3)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.clamp_(-0.01, 0.01)
    _train(plain, optimizer, 2)
    momentum = [entry["momentum_buffer"].sum().item() for entry in optimizer.state_dict()["state"].values()]
    expected = [*plain.weight.flatten().tolist(), *plain.bias.tolist(), *momentum]
    for found in _in_processes(work, 2):
        assert np.allclose(found, expected, atol=1e-6)


# -- BatchNorm's buffers ---------------------------------------------------------------------------


def _normed() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


@pytest.mark.parametrize("leaves_early", [False, True])
def test_buffers_are_averaged_over_all_workers_whoever_comes_first(leaves_early: bool) -> None:

    def work(rank: int) -> list[tuple[list[float], list[float]]]:
        torch.manual_seed(rank)
        model = _normed()
        found = []
        with _wrap(model, sync="asp", model=model) as optimizer:
            optimizer.wait_for_start()
            for turn in range(3):
                steps_on(model, optimizer, torch.randn(8, 4) + rank)
                own: Any = model[0].running_mean
                mine = own.tolist()
                if leaves_early and turn == 2:
                    if rank:
                        return [(mine, [])]
                    optimizer.wait_for_others()
                optimizer.average_buffers()
                found.append((mine, own.tolist()))
        return found[-1:]

    outcomes = _in_processes(work, 3)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes
    expected = np.mean([outcome[0][0] for outcome in outcomes], axis=0)
    for outcome in outcomes[: 1 if leaves_early else 3]:
        assert np.allclose(outcome[0][1], expected, atol=1e-6)


def test_worker_that_does_not_average_is_named() -> None:

    def work(rank: int) -> None:
        model = _normed()
        with _wrap(model, sync="asp", model=model, timeout_s=1.0) as optimizer:
            optimizer.wait_for_start()
            if rank == 0:
                optimizer.average_buffers()
            for _ in range(60):
                steps_on(model, optimizer, torch.randn(8, 4))
                time.sleep(0.05)

    kind, sentence = _in_processes(work, 2)[0]
    assert kind == "TimeoutExceededError"
    assert "average_buffers(), its call number 1, for worker 1" in sentence
