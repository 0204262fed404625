"""Workers that a fork server forks: each has what a new process has, and programs that cannot be forked are new processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastps.errors import UsageError
from fastps.processes.launcher import Launcher
from fastps.processes.program import TORCH_IMPORTS, Program
from tests.support.processes import wait_until
from tests.support.scripts import program

ALL_OF_IT = """
import faulthandler, gc, json, logging, os, random, signal, sys, threading, warnings
main = sys.modules["__main__"]
data = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path,
    "flags": str(sys.flags), "cwd": os.getcwd(),
    "name": __name__, "file": main.__file__,
    "spec": main.__spec__ and [main.__spec__.name, main.__spec__.origin, main.__spec__.parent],
    "package": str(main.__package__),
    "names": sorted(vars(main)), "builtins": str(type(__builtins__)), "loader": type(main.__loader__).__name__,
    "environment": {k: v for k, v in os.environ.items()
                    if k not in ("FASTPS_JOB", "FASTPS_RUN", "MASTER_PORT", "TORCHELASTIC_RUN_ID")},
    "streams": [str((s.encoding, s.errors, s.line_buffering, s.write_through, s.name, s.mode))
                for s in (sys.stdin, sys.stdout, sys.stderr)],
    "stdin": [sys.stdin.read(), os.readlink("/proc/self/fd/0")],
    "files": len(os.listdir("/proc/self/fd")),
    "signals": {n.name: str(signal.getsignal(n)) for n in signal.valid_signals() if isinstance(n, signal.Signals)},
    "blocked": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "faulthandler": faulthandler.is_enabled(), "warnings": sorted(str(line) for line in warnings.filters),
    "threads": threading.active_count(),
    "main_thread": threading.current_thread() is threading.main_thread(),
    "gc": [gc.isenabled(), gc.get_threshold()], "hook": sys.excepthook is sys.__excepthook__,
    "log": logging.root.handlers == [],
    "group": os.getpgid(0) == os.getpid(), "parent": os.getppid(), "cores": sorted(os.sched_getaffinity(0)),
    "umask": os.umask(0o22), "trace": str(sys.gettrace()),
}
with open(os.path.join(os.environ["RESULTS"], os.environ["FASTPS_RANK"]), "w") as file:
    json.dump(data, file)
"""

# With torch, whose imports take seconds, and without.
WITH_TORCH = "import fastps.torch.optimizer, torch\ntorch.optim.SGD([torch.zeros(1, requires_grad=True)])\n" + ALL_OF_IT


def _results(folder: Path, method: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    results = folder / f"results-{method}"
    results.mkdir()
    monkeypatch.setenv("RESULTS", str(results))
    launcher = Launcher([sys.executable, *arguments], 2, start_method=method, job=f"same-{os.getpid()}")
    outcome = launcher.run()
    assert outcome.exit_code == 0, [list(worker.errors.tail) for worker in outcome.workers]
    found = [json.loads((results / str(rank)).read_text()) for rank in range(2)]
    for row in found:
        del row["environment"]["RESULTS"], row["environment"]["FASTPS_LAUNCHER"]
    return found


@pytest.mark.parametrize(("kind", "text"), [
    pytest.param("script", ALL_OF_IT, id="a plain script"),
    pytest.param("module", WITH_TORCH, id="a module with torch", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_forked_worker_has_what_a_new_process_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    folder = tmp_path / "scripts" if kind == "script" else tmp_path / "package"
    folder.mkdir()
    (folder / "shown.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "error::ImportWarning")
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    arguments = ["scripts/shown.py", "--epochs", "3"] if kind == "script" else ["-m", "package.shown", "--epochs", "3"]
    new = _results(tmp_path, "spawn", arguments, monkeypatch)
    forked = _results(tmp_path, "fork", arguments, monkeypatch)
    assert forked == new
    assert new[1]["argv"][1:] == ["--epochs", "3"]


CASES = {
    "sentence": "import sys; sys.exit('the disk is full')",
    "number": "import sys; sys.exit(7)",
    "hard": "import os; os._exit(9)",
    "signal": "import os; os.kill(os.getpid(), 9)",
    "interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "error": "def inner():\n    raise ValueError('no')\ninner()",
    "chained": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('no') from e",
    "syntax": "def (",
    "hook": "import sys\nsys.excepthook = lambda *seen: print(seen[0].__name__, seen[2].tb_frame.f_code.co_name)\n1 / 0",
    "atexit": "import atexit, sys\natexit.register(print, 'at exit')\nprint('no newline', end='')\nsys.exit(2)",
    "thread": "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
    "missing": None,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", list(CASES))
def test_a_forked_worker_ends_as_a_new_process_does(tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    text = CASES[case]
    command = program(tmp_path, text) if text is not None else [sys.executable, "-m", "no_such_module_at_all"]
    ends = []
    for method in ("spawn", "fork"):
        outcome = Launcher(command, 1, start_method=method, tracebacks=True).run()
        captured = capsys.readouterr()
        ends.append((outcome.workers[0].exit_code, captured.out, captured.err))
    assert ends[1] == ends[0]


POOLS = """
import multiprocessing, pickle

class Here:
    pass

def double(number):
    return 2 * number

if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Here()))) is Here
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.map(double, [21]))
"""


def test_classes_of_a_forked_main_module_are_pickled_and_multiprocessing_finds_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Launcher(program(tmp_path, POOLS), 1).run().exit_code == 0
    assert capsys.readouterr().out == "[0] spawn [42]\n[0] fork [42]\n"


def test_a_fork_server_leaves_nothing_that_python_warns_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert Launcher(program(tmp_path, "print('well')"), 1).run().exit_code == 0
    assert capsys.readouterr() == ("[0] well\n", "")


@pytest.mark.slow
def test_torch_is_imported_once_without_threads_and_without_cuda(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # else the number of workers gives it
    text = "import sys\nhas_it = 'torch' in sys.modules\nimport os, torch\n"
    text += "print(has_it, torch.cuda.is_initialized(), torch.get_num_threads(),"
    text += " len(os.listdir('/proc/self/task')), torch.initial_seed())\n"
    text += "from fastps.system.processes import is_fork\nassert not is_fork(), 'its parent computed nothing'"
    assert Launcher(program(tmp_path, text), 2, start_method="fork").run().exit_code == 0
    seen = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in seen] == [["True", "False", "1", "1"]] * 2
    assert len({line[4] for line in seen}) == 2, "each process has a seed of its own"


@pytest.mark.parametrize(("module", "reason"), [
    ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "thread"),
    ("import sys, types\nspace = types.SimpleNamespace\nsys.modules['torch'] = space(optim=space(SGD=list),"
     " zeros=lambda *a, **k: 0, cuda=space(is_initialized=lambda: True))", "CUDA"),
])  # fmt: skip
def test_an_import_that_does_not_survive_a_fork_makes_new_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, module: str, reason: str
) -> None:
    (tmp_path / "unfit.py").write_text(module)
    command = program(tmp_path, "import sys\nassert 'unfit' not in sys.modules")
    assert Launcher(command, 2, imports=["unfit"]).run().exit_code == 0
    assert re.search(f"workers are new processes.*{reason}", caplog.text)


def test_programs_that_no_fork_server_can_run(tmp_path: Path) -> None:
    script = program(tmp_path, "import numpy")
    assert Program(script).can_fork
    assert Program([sys.executable, "-m", "train", "-u"]).can_fork
    for command in (["/bin/true"], [sys.executable, "-u", script[1]], [sys.executable, "-c", "1"], [sys.executable]):
        assert not Program(command).can_fork, command
    with pytest.raises(UsageError, match="--start-method: expected fork or spawn, found 'forkserver'"):
        Launcher(script, 1, start_method="forkserver")


@pytest.mark.parametrize(("text", "imports"), [
    ("import os.path, sys", ()), ("import os\nif 1:\n    import fastps", TORCH_IMPORTS), ("from . import x", TORCH_IMPORTS),
])  # fmt: skip
def test_torch_is_imported_for_scripts_that_need_more_than_the_standard_library(
    tmp_path: Path, text: str, imports: tuple[str, ...]
) -> None:
    assert Program(program(tmp_path, text)).imports == imports


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "the launcher's death"])
@pytest.mark.sampled(2)
def test_the_end_of_the_launcher_while_the_fork_server_imports_ends_all(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "torch.py").write_text("open('imports', 'w').close()\nimport time\ntime.sleep(60)")
    (tmp_path / "script.py").write_text("import torch")
    command = [sys.executable, "-m", "fastps", "run", "-n", "2", "script.py"]
    job = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, process_group=0)
    wait_until((tmp_path / "imports").exists, 60)
    children = psutil.Process(job.pid).children(recursive=True)
    assert children
    os.kill(job.pid, number)
    job.communicate(timeout=10)
    assert job.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    _, alive = psutil.wait_procs(children, timeout=3)
    assert not alive
