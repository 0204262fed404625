"""Accelerate with fastps: the example, Accelerate's calls under each discipline, deaths, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UnsupportedError
from tests.clients.programs import needs
from tests.integrations import programs

needs("accelerate")

SMALL = ("--epochs", "3", "--batch-size", "16", "--accumulate", "1", "--lr", "0.005")


def test_example_differs_from_its_plain_program_in_one_line() -> None:
    changed = programs.changed_lines("accelerate_digits_plain.py", "accelerate_digits.py")
    assert changed == ["from fastps.integrations.accelerate import Accelerator"]


@pytest.mark.parametrize("way", ["torchrun", "accelerate launch"])
def test_example_learns_and_ends_with_one_version_in_all_workers(way: str, tmp_path: Path) -> None:
    found = programs.figures(way, "accelerate_digits.py", tmp_path, *SMALL, sync="asp")
    assert found["processes"] == 2
    assert found["accuracy"] > 0.85
    assert len(set(found["weights"])) == 1


def test_alone_it_computes_what_the_plain_program_computes(tmp_path: Path) -> None:
    plain = programs.figures("alone", "accelerate_digits_plain.py", tmp_path, *SMALL)
    found = programs.figures("alone", "accelerate_digits.py", tmp_path, *SMALL)
    assert found["processes"] == 1
    assert found["weights"] == pytest.approx(plain["weights"], rel=1e-3)
    assert found["accuracy"] == pytest.approx(plain["accuracy"], abs=0.01)
    assert plain["accuracy"] > 0.85


def test_run_that_stopped_goes_on_from_its_saved_state(tmp_path: Path) -> None:
    def run(*more: str) -> dict[str, Any]:
        options = (*SMALL, "--mixed-precision", "bf16", *more)
        return programs.figures("fastps run", "accelerate_digits.py", tmp_path, *options, sync="bsp")

    stopped = run("--until", "2", "--checkpoint", "saved")
    resumed, whole = run("--resume", "saved"), run()
    assert resumed["accuracy"] >= stopped["accuracy"] - 0.03
    assert abs(resumed["accuracy"] - whole["accuracy"]) < 0.06, "under bsp the order of arrivals does not matter"
    assert whole["processes"] == 2 and len(set(whole["weights"])) == 1


STEPS = """
import os, signal, time, torch
from fastps.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
def step():
    accelerator.backward(model(torch.ones(2, 4)).sum()); optimizer.step(); optimizer.zero_grad()
step()
"""
LOADS = """
accelerator.save_state("saved")
saved = model.weight.detach().clone()
step()
accelerator.load_state("saved")
assert torch.equal(model.weight, saved)
step()
accelerator.wait_for_everyone()
assert torch.allclose(model.weight, saved - 0.2), (model.weight, saved)  # the gradient is 2 in every worker
accelerator.end_training()
"""


def test_state_is_loaded_between_steps_in_every_worker(tmp_path: Path) -> None:
    ended = programs.run_text(STEPS + LOADS, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr


CALLS = """
import json, sys, torch
from fastps.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rank, size = accelerator.process_index, accelerator.num_processes
assert accelerator.is_main_process == (rank == 0) and accelerator.local_process_index == rank and size == 3
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(sgd, 1000)
data = torch.utils.data.TensorDataset(torch.arange(40.0).view(20, 2) / 40)
loader = torch.utils.data.DataLoader(data, batch_size=3)
optimizer, schedule, loader, model = accelerator.prepare(sgd, schedule, loader, model)
assert type(model) is torch.nn.Linear
for step in range(4 + 5 * rank):  # not as many as the others
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(4, 2)).mean())
        if accelerator.sync_gradients:
            accelerator.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step(); schedule.step(); optimizer.zero_grad()
assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1, 2]
assert accelerator.reduce(torch.tensor(1.0 + rank), "mean").item() == 2.0
seen = torch.cat([accelerator.gather_for_metrics(rows)[:, 0] for (rows,) in loader])
assert len(seen) == 20 and len(set(seen.tolist())) == 20, seen
objects = accelerator.gather_for_metrics(["of worker %d" % rank], use_gather_object=True)
assert len(objects) == 3
accelerator.wait_for_everyone()
weights = accelerator.gather(model.weight.detach().clone())
assert (weights == weights[:1]).all(), weights
with accelerator.main_process_first():
    pass
job = optimizer.optimizer
accelerator.end_training()
open("result-%d.json" % rank, "w").write(json.dumps({"version": job.worker.closed}))
"""


@pytest.mark.parametrize("sync", ["bsp", "dssp:1,3", "backup:1"])
def test_workers_that_step_unequally_often_meet_in_gathers_under_each_discipline(sync: str, tmp_path: Path) -> None:
    ended = programs.run_text(CALLS, tmp_path, workers=3, sync=sync)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(list(tmp_path.glob("result-*.json"))) == 3


DYING = """
step(); step()
if accelerator.process_index == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
accelerator.gather(torch.ones(1))
"""


def test_death_of_a_worker_ends_those_that_wait_in_a_gather_with_an_error_that_names_it(tmp_path: Path) -> None:
    ended = programs.run_text(STEPS + DYING, tmp_path, workers=3, sync="asp")
    assert ended.returncode != 0
    assert "worker 1 failed first: ended by SIGKILL" in ended.stdout + ended.stderr
    assert ended.stderr.count("fastps.errors.WorkerDiedError: worker 1 ") == 2, ended.stderr


def test_handlers_without_effect_are_refused() -> None:
    from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs

    from fastps.integrations.accelerate import Accelerator

    for handler in (DistributedDataParallelKwargs(), GradScalerKwargs(), InitProcessGroupKwargs()):
        with pytest.raises(UnsupportedError, match=f"{type(handler).__name__} would have no effect"):
            Accelerator(cpu=True, kwargs_handlers=[handler])


REFUSED: list[tuple[dict[str, Any], str]] = [  # arguments, or variables of the environment, whose names are upper case
    ({"mixed_precision": "fp16"}, "expected mixed_precision 'bf16' or 'no', found 'fp16'"),
    ({"fsdp_plugin": object()}, "FSDP shards or averages itself"),
    ({"deepspeed_plugin": object()}, "DeepSpeed shards or averages itself"),
    ({"megatron_lm_plugin": object()}, "Megatron-LM shards or averages itself"),
    ({"parallelism_config": object()}, "ParallelismConfig shards or averages itself"),
    ({"ACCELERATE_USE_FSDP": "true"}, "found ACCELERATE_USE_FSDP"),
    ({"ACCELERATE_USE_DEEPSPEED": "true"}, "found ACCELERATE_USE_DEEPSPEED"),
    ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "found 'fp16'"),
    ({"FASTPS_ON_WORKER_LOSS": "continue"}, "expected a job that stops with a lost worker"),
    ({"FASTPS_JOINS": "1"}, "this worker replaces a lost one"),
    ({"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2",
      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "FASTPS_SYNC": "asp"}, "expected every node to have the weights"),
    ({"FASTPS_RANK": "0", "FASTPS_WORKERS": "2"}, "neither FASTPS_JOB nor torchrun.s variables say which job"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[next(iter(given)) for given, _ in REFUSED])
def test_arguments_and_launches_that_cannot_work_are_refused(
    given: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastps.integrations.accelerate import Accelerator

    for name in filter(str.isupper, given):
        monkeypatch.setenv(name, given[name])
    with pytest.raises(Exception, match=sentence) as raised:
        Accelerator(cpu=True, **{name: value for name, value in given.items() if not name.isupper()})
    assert type(raised.value).__module__ == "fastps.errors"


# What Accelerate imports of torch_xla, which no test machine has; PJRT_DEVICE is torch_xla's own variable.
TORCH_XLA = {
    **dict.fromkeys(("__init__.py", "core/__init__.py", "core/xla_model.py", "distributed/__init__.py"), ""),
    "distributed/xla_multiprocessing.py": "",
    "distributed/parallel_loader.py": "class MpDeviceLoader:\n    pass\n",
    "runtime.py": "import os\ndef device_type():\n    return os.environ['PJRT_DEVICE']\n",
}
TPU = """
from accelerate.utils import is_torch_xla_available
from fastps.integrations.accelerate import Accelerator

print("Accelerate finds a TPU:", is_torch_xla_available(check_is_tpu=True), flush=True)
Accelerator()
print("made")
"""


def test_workers_on_a_tpu_are_refused_and_may_train_without_it(tmp_path: Path) -> None:
    for file, content in TORCH_XLA.items():
        (tmp_path / "torch_xla" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch_xla" / file).write_text(content)
    words = programs.command("alone", programs.program(TPU, tmp_path))
    refused = programs.run(words, tmp_path, PJRT_DEVICE="TPU", USE_TORCH_XLA="1")
    assert refused.stdout == "Accelerate finds a TPU: True\n", refused.stdout + refused.stderr
    assert "UnsupportedError: expected workers on CPUs or GPUs, found the package torch_xla" in refused.stderr
    trained = programs.run(words, tmp_path, PJRT_DEVICE="TPU", USE_TORCH_XLA="0")
    assert trained.stdout == "Accelerate finds a TPU: False\nmade\n", trained.stdout + trained.stderr


def test_optimizer_that_is_wrapped_already_is_refused() -> None:
    import torch

    import fastps
    from fastps.integrations.accelerate import Accelerator

    model = torch.nn.Linear(2, 1)
    with fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)) as optimizer:
        with pytest.raises(UnsupportedError, match="expected a torch optimizer, which prepare wraps"):
            Accelerator(cpu=True).prepare(model, optimizer)
