"""fastps.spawn: what reaches the workers, what comes back, and that all of them end.

The functions here are local, so cloudpickle copies them; the workers import torch only where a test needs it.
"""

import copy
import itertools
import json
import linecache
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

import fastps
from fastps.processes import spawn
from tests.support.processes import children_of, runs, wait_until
from tests.support.scripts import output, program, started
from tests.support.torch_optimizers import alone, steps_on  # noqa: F401

METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork servers import nothing, which takes seconds less."""
    monkeypatch.setattr(spawn, "TORCH_IMPORTS", ())


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(4, 1)


def _wrap(model: torch.nn.Module, **options: Any) -> fastps.DistributedOptimizer:
    return fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), **options)


# -- training --------------------------------------------------------------------------------------


def _training() -> Callable[..., None]:
    """A function like one of a notebook: it uses a function and a class of the same program."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _model()

        def forward(self, inputs: torch.Tensor) -> Any:
            return self.layer(inputs)

    def train(rank: int, model: torch.nn.Module, steps: int) -> None:
        net = Net()
        net.layer.load_state_dict(model.state_dict())
        optimizer = fastps.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01))
        assert (fastps.rank(), fastps.world_size()) == (rank, 2)
        for _ in range(steps + rank):
            optimizer.zero_grad()
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        optimizer.wait_for_others()
        optimizer.close()
        model.load_state_dict(net.layer.state_dict())

    return train


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
def test_spawn_leaves_the_final_weights_in_the_parents_model(method: str) -> None:
    model = _model()
    expected = copy.deepcopy(model)
    fastps.spawn(_training(), (model, 20), workers=2, sync="asp", model=model, start_method=method)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01)
    # The gradient is the same whatever the weights are, so each push counts alike.
    steps_on(expected, optimizer, torch.ones(2, 4), 20 + 21)
    assert torch.allclose(model.weight, expected.weight, atol=1e-5)


def test_a_model_gets_the_jobs_last_weights_also_where_worker_0_is_the_first_to_close() -> None:
    def train(rank: int, model: torch.nn.Module) -> None:
        with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), "asp") as optimizer:
            optimizer.wait_for_start()
            for _ in range(1 + 20 * rank):
                time.sleep(0.01)
                optimizer.zero_grad()
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()

    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight)
    fastps.spawn(train, (model,), workers=2, model=model)
    assert model.weight.tolist() == [[-22.0] * 4]


def test_spawned_workers_may_have_data_loaders_with_processes_of_their_own() -> None:
    def train(rank: int, model: torch.nn.Module) -> None:
        data = torch.utils.data.TensorDataset(torch.ones(4, 4))
        optimizer = _wrap(model)
        for (inputs,) in torch.utils.data.DataLoader(data, batch_size=2, num_workers=1):
            steps_on(model, optimizer, inputs)

    before = (model := _model()).weight.clone()
    fastps.spawn(train, (model,), workers=2, model=model, start_method="fork")
    assert not torch.equal(model.weight, before), "the loaders' batches were trained on"


# -- what reaches a worker -------------------------------------------------------------------------


@pytest.mark.usefixtures("without_torch")
def test_lambdas_and_closures_reach_workers_that_have_nothing_else_of_the_caller(tmp_path: Path) -> None:
    scale, held = [2.0, 3.0], threading.Lock()
    sys.modules["a_module_of_the_caller"] = types.ModuleType("a_module_of_the_caller")
    os.environ["A_TEST_OF_SPAWN"] = "seen"
    waiting = threading.Thread(target=held.acquire)
    try:
        with held:
            waiting.start()
            write = lambda rank, factor: (tmp_path / str(rank)).write_text(  # noqa: E731
                json.dumps(
                    {
                        "product": scale[rank] * factor,
                        "threads": threading.active_count(),
                        "caller's": "a_module_of_the_caller" in sys.modules,
                        "torch": "torch" in sys.modules,
                        "group": os.getpgid(0) == os.getpid(),
                        "environment": [os.environ["A_TEST_OF_SPAWN"], os.environ["FASTPS_RANK"]],
                        "argv": sys.argv,
                        "path": sys.path,
                    }
                )
            )
            fastps.spawn(write, (10,), workers=2)
    finally:
        waiting.join()
        del sys.modules["a_module_of_the_caller"], os.environ["A_TEST_OF_SPAWN"]
    for rank in range(2):
        found = json.loads((tmp_path / str(rank)).read_text())
        assert found["product"] == scale[rank] * 10
        assert (found["threads"], found["caller's"], found["torch"], found["group"]) == (1, False, False, True)
        assert found["environment"] == ["seen", str(rank)]
        assert (found["argv"], found["path"]) == (sys.argv, sys.path)


PROGRAM = """
import enum, functools, pickle, sys
import fastps

class Setting:
    rate = 0.5

setting = Setting()

def work(rank, folder):
    setting.rate *= 2  # a copy: the caller's stays
    with open(f"{folder}/{rank}", "wb") as file:
        pickle.dump(setting, file)  # plain pickle finds the class in __main__
    for number in range(50):
        print("worker", rank, "line", number, flush=True)

class Failed(Exception):
    pass

class Kind(enum.Enum):
    ONE, TWO = 1, 2

@functools.lru_cache(maxsize=2)
def squared(number):
    return number * number

def look(rank, kind):
    assert kind is Kind.TWO and squared(3) == 9 and squared.cache_parameters()["maxsize"] == 2

def fail(rank):
    raise Failed("as it had to")

setting.rate = 0.75
fastps.spawn(look, (Kind.TWO,), workers=1)
fastps.spawn(work, (sys.argv[1],), workers=2)
for method in ("forkserver", "fork"):
    try:
        fastps.spawn(fail, workers=1, start_method=method)
    except Failed as error:
        print(error)
print(setting.rate, [pickle.load(open(f"{sys.argv[1]}/{rank}", "rb")).rate for rank in range(2)])
"""


@pytest.mark.slow
def test_unguarded_program_hands_over_what_its_names_mean_at_the_call(tmp_path: Path) -> None:
    lines = output([*program(tmp_path, PROGRAM), str(tmp_path)]).splitlines()
    assert lines[-3:] == ["as it had to", "as it had to", "0.75 [1.5, 1.5]"]
    expected = sorted(f"worker {rank} line {number}" for rank in range(2) for number in range(50))
    assert sorted(lines[:-3]) == expected, "lines of workers do not mix"


def test_program_from_standard_input_starts_workers() -> None:
    text = "import fastps\nfastps.spawn(lambda rank: print('worker', rank), workers=2)\n"
    assert sorted(output([sys.executable], input=text).splitlines()) == ["worker 0", "worker 1"]


def test_workers_are_new_processes_where_an_import_starts_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='sleeper').start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(spawn, "TORCH_IMPORTS", ("starts_a_thread",))
    fastps.spawn(lambda rank: (tmp_path / str(rank)).touch(), workers=2)
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
    assert "workers are new processes: the fork server is not ready: an import has started a thread (sleeper)" in caplog.text


@pytest.mark.parametrize(
    "method", [pytest.param("forkserver", marks=pytest.mark.slow), pytest.param("spawn", marks=pytest.mark.slow), "fork"]
)
def test_each_worker_draws_other_numbers(tmp_path: Path, method: str) -> None:
    def draw(rank: int) -> None:
        drawn = [torch.rand(1).item(), np.random.rand(), random.random()]
        (tmp_path / str(rank)).write_text(" ".join(map(str, drawn)))

    fastps.spawn(draw, workers=2, start_method=method)
    one, other = ((tmp_path / rank).read_text().split() for rank in "01")
    assert all(a != b for a, b in zip(one, other, strict=True))


def _spawn_in_a_daemon(method: str, folder: str) -> str:
    try:
        fastps.spawn(lambda rank: Path(folder, str(rank)).touch(), workers=2, start_method=method)
    except fastps.UsageError as error:
        return str(error)
    return "done"


@pytest.mark.usefixtures("without_torch")
def test_daemon_of_multiprocessing_starts_workers_except_by_fork(tmp_path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(_spawn_in_a_daemon, ("forkserver", str(tmp_path))) == "done"
        assert (tmp_path / "0").exists() and (tmp_path / "1").exists()
        sentence = pool.apply(_spawn_in_a_daemon, ("fork", str(tmp_path)))
    assert "expected a process that may have children, found a daemon of multiprocessing" in sentence


# -- what comes back -------------------------------------------------------------------------------


class OfTheModuleError(Exception):
    """An exception of an ordinary module."""


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(2)
def test_exception_of_a_worker_is_raised_with_its_class_and_its_traceback(method: str) -> None:
    class LocalError(Exception):
        pass

    kind = OfTheModuleError if method == "fork" else LocalError  # a fork cannot tell whose local class it has

    def work(rank: int) -> None:
        if rank == 1:
            raise kind("no luck")
        time.sleep(60)

    with pytest.raises(kind, match="no luck") as caught:
        fastps.spawn(work, workers=2, start_method=method)
    text = str(caught.value.__cause__)
    assert f'File "{__file__}"' in text and "in work" in text and 'raise kind("no luck")' in text
    assert "spawned.py" not in text, "the first frame is the function's"


@pytest.mark.usefixtures("without_torch")
def test_traceback_shows_lines_of_a_cell_that_is_in_no_file() -> None:
    cell, name = "def work(rank):\n    return 1 / 0  # of a cell\n", "/tmp/nowhere/cell-1.py"
    linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(cell, name, "exec"), names)
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            fastps.spawn(names["work"], workers=1)
    finally:
        del linecache.cache[name]
    assert f'File "{name}", line 2, in work\n    return 1 / 0  # of a cell\n' in str(caught.value.__cause__)


@pytest.mark.usefixtures("without_torch")
def test_exception_that_does_not_pickle_comes_back_as_its_text() -> None:
    class HoldsALockError(Exception):
        def __init__(self) -> None:
            super().__init__("it holds a lock")
            self.lock = threading.Lock()

    def work(rank: int) -> None:
        raise HoldsALockError

    with pytest.raises(RuntimeError, match="HoldsALockError: it holds a lock"):
        fastps.spawn(work, workers=1)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
@pytest.mark.sampled(2)
def test_worker_that_was_killed_is_named_and_its_own_children_end_with_it(method: str, tmp_path: Path) -> None:
    def work(rank: int) -> None:
        (tmp_path / str(rank)).write_text(str(subprocess.Popen(["sleep", "100"]).pid))
        if rank == 1:
            os.kill(os.getpid(), 9)
        time.sleep(60)

    with pytest.raises(fastps.WorkerDiedError, match=r"worker 1 .* SIGKILL") as caught:
        fastps.spawn(work, workers=2, start_method=method)
    assert caught.value.worker == 1
    _await_end([int((tmp_path / str(rank)).read_text()) for rank in range(2)])


def test_a_worker_that_was_killed_while_the_oom_killer_was_at_work_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "oom_kills", itertools.count().__next__)
    with pytest.raises(fastps.WorkerDiedError, match=r"its process gone, .*by the kernel's OOM killer; memory ran out: use"):
        fastps.spawn(lambda rank: os.kill(os.getpid(), 9), workers=1, start_method="fork")


@pytest.mark.usefixtures("without_torch")
def test_worker_that_exits_has_failed_if_it_gives_a_code() -> None:
    fastps.spawn(lambda rank: sys.exit(0), workers=2)
    with pytest.raises(fastps.WorkerDiedError, match=r"worker 0 .* ended with exit code 3"):
        fastps.spawn(lambda rank: sys.exit(3), workers=1)


# -- Ctrl-C, and the caller's death ----------------------------------------------------------------


def _await_end(process_ids: list[int]) -> None:
    """Wait until no process of these runs."""
    wait_until(lambda: not any(map(runs, process_ids)), 10, f"some of these still run: {process_ids}")


def _started(folder: Path, text: str, **how: Any) -> tuple["subprocess.Popen[str]", IO[str]]:
    """A program that runs, and its output."""
    running = started(program(folder, text), **how)
    assert running.stdout is not None
    return running, running.stdout


WAITS = """
import os, signal, subprocess, sys, time, fastps
def work(rank):
    child = subprocess.Popen(["sleep", "100"])
    if {stubborn}:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os.write(1, b"signal %d\\n" % number))
    os.write(1, b"%d %d\\n" % (os.getpid(), child.pid))
    time.sleep(60)
if __name__ == "__main__":
    fastps.spawn(work, workers=2, start_method={method!r})
"""


def _waiting(folder: Path, method: str, *, stubborn: bool = False) -> tuple["subprocess.Popen[str]", list[int]]:
    """A program whose workers wait, and the numbers of the workers and of their children."""
    running, said = _started(folder, WAITS.format(method=method, stubborn=stubborn), process_group=0)
    numbers = [int(number) for _ in range(2) for number in said.readline().split()]
    assert len(numbers) == 4
    return running, numbers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sampled(2)
def test_ctrl_c_ends_all_that_spawn_started(method: str, tmp_path: Path) -> None:
    running, numbers = _waiting(tmp_path, method)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal and Jupyter do
    _, told = running.communicate(timeout=20)
    assert running.returncode == -signal.SIGINT
    assert told.count("\nKeyboardInterrupt") == 1, told  # its own; no worker tells of it, too
    _await_end(numbers)


@pytest.mark.slow
def test_second_ctrl_c_kills_workers_that_ignore_signals(tmp_path: Path) -> None:
    running, numbers = _waiting(tmp_path, "forkserver", stubborn=True)
    os.kill(running.pid, signal.SIGINT)
    assert running.stdout is not None
    said = running.stdout.readline()  # now it has counted one: two that come together are one
    assert said == f"signal {int(signal.SIGINT)}\n"
    os.kill(running.pid, signal.SIGINT)
    told, _ = running.communicate(timeout=20)
    assert running.returncode == -signal.SIGINT
    assert f"signal {int(signal.SIGTERM)}" not in told, "SIGKILL came at once, and not SIGTERM after two seconds"
    _await_end(numbers)


@pytest.mark.slow
def test_workers_have_the_time_to_save_after_ctrl_c(tmp_path: Path) -> None:
    """It takes longer than the four seconds that workers once had."""
    running, said = _started(
        tmp_path,
        "import os, pathlib, sys, time, fastps\ndef work(rank):\n    os.write(1, b'ready\\n')\n"
        "    try:\n        time.sleep(60)\n    except KeyboardInterrupt:\n        time.sleep(5)\n"
        f"        pathlib.Path({str(tmp_path)!r}, f'saved{{rank}}').touch()\n        raise\n"
        "if __name__ == '__main__':\n    fastps.spawn(work, workers=2)\n",
    )
    assert [said.readline() for _ in range(2)] == ["ready\n"] * 2
    os.kill(running.pid, signal.SIGINT)
    _, told = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT, told
    assert len(list(tmp_path.glob("saved*"))) == 2, told
    assert "waiting up to 29 s for worker 0, worker 1 to save and end; Ctrl-C kills at once" in told


def test_ctrl_c_during_the_imports_starts_no_worker(tmp_path: Path) -> None:
    (tmp_path / "is_slow.py").write_text("import os, time\nos.write(1, b'begun\\n')\ntime.sleep(60)\n")
    running, said = _started(
        tmp_path,
        "import sys, fastps\nfrom fastps.processes import spawn\nspawn.TORCH_IMPORTS = ('is_slow',)\n"
        "sys.modules['torch'] = sys\nfastps.spawn(lambda rank: print('worker'), workers=2)\n",
    )
    assert said.readline() == "begun\n"
    (server,) = children_of(running.pid)
    os.kill(running.pid, signal.SIGINT)
    told, _ = running.communicate(timeout=20)
    assert (running.returncode, told) == (-signal.SIGINT, "")
    _await_end([server])


@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_the_caller(method: str, tmp_path: Path) -> None:
    running, numbers = _waiting(tmp_path, method)
    running.kill()
    running.wait()
    _await_end(numbers[::2])
    for number in numbers[1::2]:
        os.kill(number, signal.SIGKILL)  # nobody is left to end what the workers started
    running.communicate(timeout=20)


# -- calls that cannot work ------------------------------------------------------------------------


def _any(rank: int) -> None:
    raise AssertionError("no worker is started")


@pytest.mark.parametrize(("arguments", "sentence"), [
    ({"workers": 0}, "workers: expected 1 to 1024, found 0"),
    ({"workers": "2"}, "workers: expected 1 to 1024, found '2'"),
    ({"start_method": "thread"}, "start_method: expected one of forkserver, spawn, fork, found 'thread'"),
    ({"fn": None}, "fn: expected a function that takes a rank and args, found None; pass it without calling it"),
    ({"args": 3}, r"args: expected a tuple of the arguments after the rank, found int; write \(it,\)"),
    ({"args": (1, 2)}, r"_any\(rank, \*args\): expected it to take the rank and 2 more, found .*too many positional"),
    ({"fn": lambda: None}, "expected it to take the rank and 0 more, found .*too many positional arguments; make the rank"),
    ({"fn": lambda rank, it: None, "args": (threading.Lock(),)}, r"found args\[0\], a lock: TypeError: cannot pickle"),
])  # fmt: skip
def test_call_that_cannot_work_is_refused_in_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(fastps.UsageError, match=sentence) as caught:
        fastps.spawn(**{"fn": _any, "workers": 2, **arguments})
    assert "\n" not in str(caught.value)


def test_name_that_does_not_pickle_is_told_of() -> None:
    log = open(os.devnull, "w")  # noqa: SIM115, PTH123
    sentence = r"found 'log', a TextIOWrapper that the function uses: .*start_method='fork'"
    with log, pytest.raises(fastps.UsageError, match=sentence):
        fastps.spawn(lambda rank: print(rank, file=log), workers=2)


def test_optimizer_that_was_wrapped_outside_of_the_function_is_told_of() -> None:
    optimizer = _wrap(_model())
    with optimizer, pytest.raises(fastps.UsageError, match="found 'optimizer', a DistributedOptimizer") as caught:
        fastps.spawn(lambda rank: optimizer.step(), workers=2)
    assert str(caught.value).endswith("wrap the torch optimizer in the process that trains with it")


def test_model_in_shared_memory_whose_weights_do_not_come_back_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fastps.spawn(lambda rank, model: None, (_model().share_memory(),), workers=1, start_method="fork")
    assert "args[0] lies in shared memory, but the workers train copies of it: pass it as model=, too" in caplog.text


@pytest.mark.usefixtures("without_torch")
def test_function_of_a_module_that_a_new_process_cannot_import_is_refused_by_name() -> None:
    module = types.ModuleType("exists_only_here")
    exec("def work(rank): pass", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        with pytest.raises(fastps.UsageError, match=r"worker 0 cannot load 'work' .*No module named 'exists_only_here'; put"):
            fastps.spawn(module.work, workers=1)
    finally:
        del sys.modules[module.__name__]


@pytest.mark.usefixtures("without_torch")
def test_spawn_in_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> None:
        fastps.spawn(print, workers=2)

    with pytest.raises(fastps.UsageError, match=r"expected a process that is no worker itself, found worker [01] of 2; start"):
        fastps.spawn(work, workers=2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(fastps.UsageError, match="found worker 1 of 4"):
        fastps.spawn(_any, workers=2)
