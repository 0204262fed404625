"""How a process ends after its training: with the exit code that plain torch gives, whatever tensors outlive the interpreter.

Torch frees tensors from thread-local destructors, after Python has ended: a backward that raised leaves such tensors behind.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable

import pytest

# One process imports torch; each repeat of a case is a fork of it, which trains, and ends as the case says.
_PROGRAM = """
import atexit, json, os, sys, threading
import torch
import torch._dynamo  # torch imports it with the first optimizer, so every fork would again
import fastps.torch.optimizer  # as well: the public names are imported when they are used

cases = json.loads(sys.argv[1])
codes = {name: [] for name in cases}
for name, repeat in [(name, repeat) for repeat in range(int(sys.argv[2])) for name in cases]:
    child = os.fork()
    if child == 0:
        break
    codes[name].append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    print(json.dumps(codes))
    sys.exit()
os.close(2)
os.open("/dev/null", os.O_WRONLY)


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        raise RuntimeError("a backward that raises")


class Branches(torch.nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.EmbeddingBag(50, 16, sparse=sparse, mode="sum") for _ in range(4))
        self.bottom = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.ReLU())
        self.top = torch.nn.Sequential(torch.nn.Linear(80, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.between = lambda features: features

    def forward(self, dense):
        # First in forward is last in backward: what raises in a table's backward leaves the bottom's, with its weights, queued.
        below = self.bottom(dense)
        looked_up = [table(torch.zeros(8, 3, dtype=torch.long)) for table in self.tables]
        return self.top(self.between(torch.cat([below, *looked_up], 1))).sum()


def fail(error):
    raise error


model, (before, first, last) = Branches(), cases[name]
exec(before)
optimizer = fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
for each in (first, "", last):
    exec(each)
    optimizer.zero_grad()
    model(torch.ones(8, 13)).backward()
    optimizer.step()
"""

USES_THE_MODEL = "atexit.register(lambda: model(torch.ones(8, 13)).backward())"
HOLDS_A_GRAPH = """
held, begun = threading.local(), threading.Event()
def hold():
    held.loss = model(torch.ones(8, 13))
    begun.set()
    threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
begun.wait()
"""
HOOK = "model.tables[3].weight.register_hook(lambda gradient: {})"
RAISING_BACKWARD = "model.tables[3].register_forward_hook(lambda module, arguments, result: Raising.apply(result))"
# The exit code, and what is done before the optimizer is made, before the first step, and before the last.
CASES = {
    "raising hook": (1, "", "", HOOK.format("fail(RuntimeError())")),
    "raising forward": (1, "", "", "model.between = lambda features: fail(RuntimeError())"),
    "raising backward": (1, "", "", RAISING_BACKWARD),
    "sparse gradient in the first backward": (1, "", "for table in model.tables: table.sparse = True", ""),
    "os._exit": (7, "", "", HOOK.format("os._exit(7)")),
    "daemon thread that holds a graph": (0, "", "", HOLDS_A_GRAPH),
    "atexit that uses the model": (0, USES_THE_MODEL, "", USES_THE_MODEL),
}


def _exit_codes(loops: str, repeats: int, names: Iterable[str]) -> dict[str, list[int]]:
    cases = {name: CASES[name][1:] for name in names}
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(cases), str(repeats)],
        env={**os.environ, "FASTPS_TENSOR_LOOPS": loops, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    codes: dict[str, list[int]] = json.loads(ended.stdout)
    return codes


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("loops", "times", "names"), [
    ("auto", 1, ("raising hook",)),
    pytest.param("auto", 10, tuple(CASES), marks=pytest.mark.slow),
    pytest.param("attributes", 3, tuple(CASES), marks=pytest.mark.slow),
], ids=["a sample", "compiled loops", "attributes"])  # fmt: skip
def test_process_ends_with_the_exit_code_of_plain_torch_every_time(loops: str, times: int, names: tuple[str, ...]) -> None:
    assert _exit_codes(loops, times, names) == {name: [CASES[name][0]] * times for name in names}
