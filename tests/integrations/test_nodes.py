"""Trainer, Accelerate and Lightning over nodes, all on this machine: two nodes equal one, checkpoints, losses, refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fastps.errors import UnsupportedError, UsageError
from fastps.integrations import process_group
from tests.clients.programs import needs, results
from tests.integrations import node_programs, programs

needs("accelerate", "transformers", "lightning", "torchmetrics")

CHECKPOINTS = {"trainer": "out/checkpoint-6", "accelerate": "saved", "lightning": "saved/epoch=0.ckpt"}


def _found(
    framework: str, folder: Path, counts: Sequence[int], *arguments: str, way: str = "fastps run"
) -> list[dict[str, Any]]:
    """What the workers of nodes with so many workers have noted."""
    text = getattr(node_programs, framework.upper())
    if len(counts) == 1:
        words = [*programs.command(way, programs.program(text, folder), counts[0]), *arguments]
        ended = [programs.run(words, folder)]
    else:
        ended = programs.run_on_nodes(text, folder, counts, *arguments, way=way)
    assert [each.returncode for each in ended] == [0] * len(ended), "\n".join(each.stdout + each.stderr for each in ended)
    found = results(folder)
    for file in folder.glob("result-*.json"):
        file.unlink()
    assert len(found) == sum(counts)
    return found


def _alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert [value for row in found["metrics"] for value in row] == pytest.approx(
        [value for row in expected["metrics"] for value in row], abs=1e-5
    )
    assert found["weights"] == pytest.approx(expected["weights"], rel=1e-5)
    assert found["steps"] == expected["steps"]


@pytest.mark.parametrize(("framework", "way", "counts"), [
    ("trainer", "fastps run", (1, 2)),
    ("accelerate", "torchrun", (1, 1)),
    ("lightning", "fastps run", (1, 2)),
], ids=["trainer", "accelerate, torchrun", "lightning"])  # fmt: skip
def test_two_nodes_are_one_with_as_many_workers_and_go_on_from_their_checkpoint(
    framework: str, way: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    """Over 60 seconds: three jobs, whose processes import the frameworks."""
    (tmp_path / "one").mkdir()
    (tmp_path / "nodes").mkdir()
    one = _found(framework, tmp_path / "one", (sum(counts),))
    nodes = _found(framework, tmp_path / "nodes", counts, way=way)
    assert [each["place"] for each in nodes] == [[local, sum(counts)] for count in counts for local in range(count)]
    assert [each["saves"] for each in nodes] == [each["saves"] for each in one], "the first worker alone saves"
    assert nodes[0]["saves"] > 0 and not any(each["saves"] for each in nodes[1:])
    assert len(nodes[0]["losses"]) >= 12 and len(nodes[0]["metrics"]) == 2
    for found, expected in zip(nodes, one, strict=True):
        _alike(found, expected)
    assert len({each["weights"] for each in nodes}) == 1, "all nodes have the same bits"
    resumed = _found(framework, tmp_path / "nodes", counts, CHECKPOINTS[framework], way=way)
    for found, whole in zip(resumed, nodes, strict=True):
        later = {step: loss for step, loss in whole["losses"].items() if step in found["losses"]}
        assert later
        _alike(found, {**whole, "losses": later, "metrics": whole["metrics"][-len(found["metrics"]) :]})


DYING = """
import os, signal, time, torch
from fastps.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum()); optimizer.step(); optimizer.zero_grad()
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
accelerator.gather(torch.ones(1))
"""


def test_death_on_another_node_ends_a_gather_with_an_error_that_names_the_node(tmp_path: Path) -> None:
    first, second = programs.run_on_nodes(DYING, tmp_path, (1, 1))
    assert (first.returncode, second.returncode) == (75, 75), first.stderr + second.stderr
    assert "NodeLostError: node 1" in first.stderr, first.stderr


ENDING = """
import os
if os.environ["FASTPS_NODE_RANK"] == "1":
    raise SystemExit("this node has no data")
from fastps.integrations.accelerate import Accelerator

Accelerator(cpu=True)
"""


def test_node_that_ends_before_it_meets_the_others_is_named(tmp_path: Path) -> None:
    first, _ = programs.run_on_nodes(ENDING, tmp_path, (1, 1))
    assert first.returncode == 1
    assert "NodeLostError: node 1 ended before its workers began the process group: worker 0 failed first" in first.stderr


UNEVEN = """
import time, torch
from fastps.integrations.accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(2 + accelerator.process_index):
    time.sleep(8 * (step == 2))  # so that the other's wait ends first
    accelerator.backward(model(torch.ones(2, 4)).sum()); optimizer.step(); optimizer.zero_grad()
accelerator.gather(torch.ones(1))
"""


def test_workers_that_step_unequally_often_over_nodes_end_with_a_sentence_that_says_so(tmp_path: Path) -> None:
    first, _ = programs.run_on_nodes(UNEVEN, tmp_path, (1, 1), FASTPS_TIMEOUT="20")
    assert first.returncode != 0
    assert "and over several nodes after equally many steps" in first.stderr, first.stderr


GROUP = """
import os, psutil, torch
from torch import distributed
from fastps.integrations import process_group

if os.environ["FASTPS_NODE_RANK"] == "1":
    os.environ["FASTPS_SECRET"] = os.environ["SECRET_OF_NODE_1"]
process_group.begin()
found = [None, None, None]
distributed.all_gather_object(found, distributed.get_rank())
assert found == [0, 1, 2]
process_group.barrier()
if (group := distributed.new_group([0, 2])) is not distributed.GroupMember.NON_GROUP_MEMBER:
    distributed.barrier(group)
places = {each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}
assert places == {"127.0.0.1"}, places
process_group.barrier()
"""


@pytest.mark.parametrize("others", ["a secret of these tests", "another secret of these tests"])
def test_process_group_over_nodes_listens_at_one_address_and_needs_the_jobs_secret(others: str, tmp_path: Path) -> None:
    mine = "a secret of these tests"
    ended = programs.run_on_nodes(GROUP, tmp_path, (2, 1), FASTPS_SECRET=mine, SECRET_OF_NODE_1=others)
    assert [each.returncode for each in ended] == ([0, 0] if others == mine else [1, 1]), ended[0].stderr + ended[1].stderr
    for each in ended:
        assert ("of the process group have different secrets: give all nodes the same" in each.stderr) == (others != mine)


NODES = {
    "FASTPS_NNODES": "2", "FASTPS_NODE_RANK": "0", "FASTPS_RENDEZVOUS": "127.0.0.1:1", "FASTPS_RANK": "0",
    "FASTPS_WORKERS": "2", "FASTPS_LOCAL_RANK": "0", "FASTPS_LOCAL_WORKERS": "1", "FASTPS_JOB": "none",
}  # fmt: skip
REFUSED = [
    ({"FASTPS_SYNC": "asp"}, "expected every node to have the weights and the optimizer's state.*found sync=asp"),
    ({"FASTPS_LINK_DTYPE": "bfloat16"}, "expected every node to have the weights"),
    ({"FASTPS_LOCAL_STEPS": "4"}, "expected every node to have the weights"),
    ({"FASTPS_WITHIN": "asp"}, "expected --within bsp"),
    ({"FASTPS_ON_NODE_LOSS": "continue"}, "expected a job that stops with a lost node"),
]


@pytest.mark.parametrize(("given", "sentence"), REFUSED, ids=[next(iter(given)) for given, _ in REFUSED])
def test_jobs_of_nodes_that_frameworks_cannot_train_in_are_refused(
    given: dict[str, str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch import Trainer

    from fastps.integrations.accelerate import Accelerator
    from fastps.integrations.lightning import FastpsStrategy
    from fastps.integrations.transformers import TrainingArguments

    for name, value in {**NODES, **given}.items():
        monkeypatch.setenv(name, value)
    for begin in (
        process_group.begin,
        lambda: Accelerator(cpu=True),
        lambda: TrainingArguments(str(tmp_path), use_cpu=True),
        lambda: Trainer(accelerator="cpu", strategy=FastpsStrategy(), logger=False),
    ):
        with pytest.raises(UnsupportedError, match=sentence):
            begin()


def test_discipline_of_the_script_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    from fastps.integrations.accelerate import Accelerator
    from fastps.integrations.lightning import FastpsStrategy
    from fastps.integrations.transformers import TrainingArguments

    for name, value in NODES.items():
        monkeypatch.setenv(name, value)
    for begin in (
        lambda: Accelerator(cpu=True, sync="ssp:2"),
        lambda: TrainingArguments(str(tmp_path), use_cpu=True, sync="ssp:2"),
        lambda: Trainer(accelerator="cpu", strategy=FastpsStrategy("ssp:2"), logger=False),
    ):
        with pytest.raises(UnsupportedError, match="found sync=ssp:2"):
            begin()


def test_lightning_has_the_place_that_the_launcher_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    from fastps.integrations.lightning import FastpsStrategy

    for name, value in {**NODES, "FASTPS_NODE_RANK": "1", "FASTPS_RANK": "2", "FASTPS_WORKERS": "3"}.items():
        monkeypatch.setenv(name, value)
    for options in ({}, {"num_nodes": 2}, {"num_nodes": 2, "devices": 1}):
        made = Trainer(accelerator="cpu", strategy=FastpsStrategy(), logger=False, **options)
        assert (made.world_size, made.global_rank, made.local_rank, made.node_rank) == (3, 2, 0, 1)
        assert (made.num_nodes, made.num_devices, made.is_global_zero) == (2, 1, False)
    with pytest.raises(UsageError, match="expected num_nodes=2, the launcher's number of nodes, found 3"):
        Trainer(accelerator="cpu", strategy=FastpsStrategy(), logger=False, num_nodes=3)
