"""The process group beside a job: its collectives, its subgroups, and how workers of a launch meet."""

from pathlib import Path

from tests.integrations import programs

PROGRAM = """
import torch
from torch import distributed
from torch.distributed.nn.functional import all_gather
from fastps.integrations import process_group

assert process_group.begin() and process_group.begin()
rank, size = distributed.get_rank(), distributed.get_world_size()
assert size == 2 and distributed.get_backend() == "fastps_job"
own = torch.tensor([float(rank)])
found = [torch.zeros(1), torch.zeros(1)]
distributed.all_gather(found, own)
assert [each.item() for each in found] == [0.0, 1.0]
distributed.all_reduce(own)
assert own.item() == 1.0
sent = torch.tensor([7.0 + rank])
distributed.broadcast(sent, 1)
assert sent.item() == 8.0
distributed.reduce(own, 0)
parts = [torch.zeros(1) for _ in range(2)] if rank == 0 else None
distributed.gather(torch.tensor([rank + 1.0]), parts)
assert rank or [each.item() for each in parts] == [1.0, 2.0]
share = torch.zeros(1)
distributed.scatter(share, [torch.tensor([3.0]), torch.tensor([4.0])] if rank == 0 else None)
assert share.item() == 3.0 + rank
summed = torch.zeros(1)
parts = [torch.tensor([rank + 1.0]), torch.tensor([rank + 5.0])]
distributed.reduce_scatter(summed, parts)
assert summed.item() == 3.0 + 8 * rank and parts[0].item() == rank + 1.0
distributed.reduce_scatter_tensor(summed, torch.cat(parts), distributed.ReduceOp.MAX)
assert summed.item() == 2.0 + 4 * rank
joined = torch.zeros(2)
distributed.all_gather_into_tensor(joined, torch.tensor([rank + 1.0]))
assert joined.tolist() == [1.0, 2.0]
objects = [None, None]
distributed.all_gather_object(objects, {"rank": rank})
assert objects == [{"rank": 0}, {"rank": 1}]
message = torch.zeros(1)
distributed.send(torch.ones(1), 1) if rank == 0 else distributed.recv(message, 0)
assert message.item() == rank
given = torch.tensor([rank + 1.0], requires_grad=True)
every = all_gather(given)
(every[0] * 2 + every[1] * 3).sum().backward()
assert given.grad.item() == 2 * (2.0 if rank == 0 else 3.0)
distributed.barrier(distributed.new_group([0, 1]))
for _ in range(2):  # which have one name, made of the ranks
    group = distributed.new_group([0, 1], use_local_synchronization=True)
    distributed.barrier(group)
    distributed.destroy_process_group(group)
process_group.barrier()
distributed.barrier()
distributed.destroy_process_group()
"""


def test_collectives_are_those_of_gloo(tmp_path: Path) -> None:
    """Under torchrun; the next test meets under `fastps run`."""
    ended = programs.run_text(PROGRAM, tmp_path, "torchrun")
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_worker_that_ends_before_a_job_began_is_an_error_of_fastps_in_the_others(tmp_path: Path) -> None:
    program = (
        "import sys, torch\nfrom fastps.integrations import process_group\nprocess_group.begin()\n"
        "torch.distributed.barrier()\n"
        "if torch.distributed.get_rank() == 1:\n    sys.exit(0)\n"
        "torch.distributed.all_reduce(torch.ones(1))\n"
    )
    ended = programs.run_text(program, tmp_path)
    assert ended.returncode != 0
    assert "WorkerDiedError: worker 0: expected all 2 workers in allreduce of torch.distributed, found that one" in ended.stderr


def test_spawned_workers_meet(tmp_path: Path) -> None:
    program = (
        "import fastps, torch\n"
        "def work(rank):\n    from fastps.integrations import process_group\n    process_group.begin()\n"
        "    own = torch.tensor([float(rank)])\n    torch.distributed.all_reduce(own)\n    assert own.item() == 1.0\n"
        "if __name__ == '__main__':\n    fastps.spawn(work, workers=2)\n    print('met')\n"
    )
    ended = programs.run_text(program, tmp_path, "alone")
    assert (ended.returncode, ended.stdout) == (0, "met\n"), ended.stderr
