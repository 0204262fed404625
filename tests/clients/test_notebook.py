"""Notebooks that start their own workers: the example, the page's code, errors, interrupts, and what is left behind."""

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.clients import digits
from tests.test_documentation import DOCS, ROOT, blocks_of

nbclient = pytest.importorskip("nbclient", reason="the extra fastps[clients] is not installed")
nbformat = pytest.importorskip("nbformat", reason="the extra fastps[clients] is not installed")

OWN = """
import fastps
from tests.clients import digits
model = digits.make_model()
def train(rank, model):
    optimizer = fastps.DistributedOptimizer(digits.make_sgd(model), sync="asp")
    digits.train(model, optimizer, rank, 2)
fastps.spawn(train, (model,), workers=2, model=model, start_method=METHOD)
print(digits.accuracy(model))
"""

IMPORTED = """
import fastps
from tests.clients import digits
from tests.clients.test_multiprocessing import hogwild
model = digits.make_model()
fastps.spawn(hogwild, (model,), workers=2, model=model)
print(digits.accuracy(model))
"""

TRAINS = """
import fastps, torch
def train(rank):
    model = torch.nn.Linear(2, 1)
    optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step = 0
    while True:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        step += 1
        if step == 5:
            print("begun")
"""


@pytest.fixture(autouse=True)
def as_a_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel that sees PYTEST_CURRENT_TEST shows less of the output; the programs import the task of tests.clients."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
    (tmp_path / "tests").symlink_to(Path(__file__).parents[1])


def _execute(notebook: Any, folder: Path) -> list[str]:
    """Run a notebook. Returns what each of its cells printed."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # pytest has set it again
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(folder)}}).execute()
    return [_text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]


def _text_of(cell: Any) -> str:
    return "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")


def _cells(*sources: str) -> Any:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_example_trains_its_model_and_raises_what_a_worker_raised(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
    *_, trained, failed = _execute(notebook, tmp_path)
    lines = trained.splitlines()
    assert {f"worker {rank}, step {step}" for rank in range(2) for step in (250, 500, 750)} <= {
        line.partition(":")[0] for line in lines
    }, "what workers print appears below the cell, in whole lines"
    before, after = (float(line.rpartition(" ")[2]) for line in lines if "accuracy" in line)
    assert before < 0.7
    assert after > 0.95
    assert failed.startswith("the worker raised: mat1 and mat2 shapes cannot be multiplied")


@pytest.mark.timeout(600)  # six jobs, one of whose workers import torch
def test_cells_run_the_code_of_the_page_and_train_as_the_plain_program_and_an_exception_has_the_workers_traceback(
    tmp_path: Path,
) -> None:
    page, own = (
        blocks_of(DOCS / "how-to" / "notebooks.md"),
        [OWN.replace("METHOD", repr(each)) for each in ("fork", "forkserver")],
    )
    fails = ("def fail(rank):\n    return 1 / (1 - rank)  # in the worker\n", "fastps.spawn(fail, workers=2)")
    notebook = _cells(*page, *own, IMPORTED, *fails)
    with pytest.raises(nbclient.exceptions.CellExecutionError) as caught:
        _execute(notebook, tmp_path)
    assert caught.value.ename == "ZeroDivisionError"
    printed = [_text_of(cell) for cell in notebook.cells]
    assert printed[1].count(": loss 0.0") == 2
    assert 'raise EmptyShareError("worker 1 has no samples")' in printed[2]
    assert min(map(float, printed[3:6])) >= digits.least_accuracy(), printed[3:6]
    (error,) = [output for output in notebook.cells[-1].outputs if output.output_type == "error"]
    text = "\n".join(error.traceback)
    assert "in fail" in text
    assert "return 1 / (1 - rank)  # in the worker" in text


# -- what is left behind ---------------------------------------------------------------------------


class Kernel:
    """A kernel of Jupyter, with what it has started and opened."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self.process = psutil.Process(manager.provisioner.process.pid)
        self._client = client

    def run(self, code: str, when_begun: Callable[[], object] | None = None) -> tuple[str, str]:
        """Run a cell; call `when_begun` once two workers have printed "begun". Returns the output and the error's name."""
        printed: list[str] = []
        errors: list[str] = []
        acted: list[float] = []

        def note(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                errors.append(content["ename"])
            if when_begun is not None and not acted and "".join(printed).count("begun") == 2:
                acted.append(time.monotonic())
                when_begun()

        self._client.execute_interactive(code, output_hook=note, timeout=100)
        return "".join(printed), "".join(errors)

    def children(self) -> list[psutil.Process]:
        """Its descendants, zombies too."""
        return self.process.children(recursive=True)

    def holds(self) -> Counter[str]:
        """Memory and pidfds of fastps that it has open, and its sockets."""
        opened: Counter[str] = Counter()
        for entry in Path(f"/proc/{self.process.pid}/fd").iterdir():
            target = str(entry.readlink())
            kind = next((kind for kind in ("memfd:fastps", "pidfd", "socket") if kind in target), None)
            if kind:
                opened[kind] += 1
        return opened


@contextmanager
def _kernel(folder: Path) -> Iterator[Kernel]:
    from jupyter_client.manager import start_new_kernel

    os.environ.pop("PYTEST_CURRENT_TEST", None)
    manager, client = start_new_kernel(cwd=str(folder))
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.timeout(600)  # seven jobs in one kernel
def test_nothing_is_left_after_success_error_interrupts_and_the_kernels_end(tmp_path: Path) -> None:
    acted: list[float] = []
    found: list[psutil.Process] = []
    with _kernel(tmp_path) as kernel:
        kernel.run(TRAINS)
        began = time.monotonic()
        kernel.run("fastps.spawn(lambda rank: None, workers=2)")
        limit_s = max(4.0, 2 * (time.monotonic() - began))  # a busy machine is slow in all
        before = kernel.holds()

        def interrupt() -> None:
            acted.append(time.monotonic())
            kernel.manager.interrupt_kernel()

        def kill() -> None:
            found.extend(kernel.children())
            kernel.process.send_signal(signal.SIGKILL)
            raise InterruptedError  # no reply comes

        cells: list[tuple[str, Callable[[], object] | None, str]] = [
            ("fastps.spawn(lambda rank: None, workers=2)", None, ""),
            ("fastps.spawn(lambda rank: 1 / rank, workers=2)", None, "ZeroDivisionError"),
            ("fastps.spawn(train, workers=2)", interrupt, "KeyboardInterrupt"),
            ("fastps.spawn(train, workers=2, start_method='spawn')", interrupt, "KeyboardInterrupt"),
            ("import asyncio; await asyncio.sleep(0); fastps.spawn(train, workers=2)", interrupt, "KeyboardInterrupt"),
        ]
        for code, when_begun, expected in cells:
            _, error = kernel.run(code, when_begun)
            assert error == expected, code
            # The first interrupt: workers that take signals need no SIGTERM, which comes after 2 s, nor SIGKILL.
            assert len(acted) != 1 or time.monotonic() - acted[0] < limit_s
            assert kernel.children() == [], code
            assert kernel.holds() == before, code
        assert kernel.run("print(6 * 7)") == ("42\n", ""), "the kernel goes on"
        with pytest.raises(InterruptedError):
            kernel.run("fastps.spawn(train, workers=2)", kill)
        assert len(found) == 2
        psutil.wait_procs(found, timeout=10)
        assert [worker for worker in found if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE] == []
