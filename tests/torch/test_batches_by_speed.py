"""bsp,tune=true: slow workers draw smaller batches, and the weights are those of bsp with all samples."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import fastps
from tests.support import commands
from tests.support.scripts import program

SAMPLES, BATCH, WORKERS, PASSES = 124, 8, 3, 3  # 5 steps a pass: 4 samples are left over
STEPS = SAMPLES // (WORKERS * BATCH) * PASSES
SCRIPT = f"""
import json, os, time, torch, fastps
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
inputs = torch.randn({SAMPLES}, 6)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange({SAMPLES}))
model = torch.nn.Linear(6, 1)
optimizer = fastps.DistributedOptimizer(OPTIMIZER(model.parameters(), 0.05, 0.9), model=model, batch_size={BATCH})
LOADER
drawn = []
for _ in range({PASSES}):
    for x, y, numbers in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        time.sleep(len(x) * (0.003 if fastps.rank() == 0 else 0.001))
        drawn.append(numbers.tolist())
        optimizer.step()
optimizer.wait_for_others()
Path(f"drawn-{{fastps.rank()}}").write_text(json.dumps(drawn))
torch.save(model.state_dict(), f"weights-{{fastps.rank()}}")
optimizer.close()
"""
LOADERS = {
    "shard": "loader = fastps.shard(DataLoader(data, batch_size=8, shuffle=True))",
    "BatchSampler": f"loader = DataLoader(data, batch_sampler=fastps.BatchSampler({SAMPLES}, optimizer))",
}


def _plain(orders: list[list[int]]) -> dict[str, torch.Tensor]:
    """The weights of one process that takes each version's samples as one batch."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 6)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    for chosen in orders:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs[chosen]), inputs[chosen].sum(1, keepdim=True)).backward()
        optimizer.step()
    return model.state_dict()


def _orders() -> list[list[int]]:
    """The samples of each version under bsp: the next of one permutation a pass."""
    found, size = [], WORKERS * BATCH
    for number in range(PASSES):
        order = list(RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(number)))
        found += [order[first : first + size] for first in range(0, STEPS // PASSES * size, size)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("loader", "optimizer"), [
    ("shard", "torch.optim.SGD"),
    ("BatchSampler", "type('Own', (torch.optim.SGD,), {})"),  # which runs in Python
])  # fmt: skip
def test_a_version_has_the_samples_of_bsp_and_the_slow_worker_has_fewer(
    loader: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = program(tmp_path, SCRIPT.replace("LOADER", LOADERS[loader]).replace("OPTIMIZER", optimizer))[1]
    commands.done("run", "-n", str(WORKERS), "--sync", "bsp,tune=true", script)
    drawn = [json.loads(Path(f"drawn-{rank}").read_text()) for rank in range(WORKERS)]
    assert [len(each) for each in drawn] == [STEPS] * WORKERS
    versions = [sorted(number for each in drawn for number in each[step]) for step in range(STEPS)]
    assert versions == [sorted(chosen) for chosen in _orders()]
    sizes = [[len(batch) for batch in each] for each in drawn]
    assert all(each[0] == each[1] == BATCH for each in sizes), "before a time is known"
    assert sum(sizes[0][-5:]) < 0.75 * min(sum(sizes[1][-5:]), sum(sizes[2][-5:])), sizes  # 3.4 of 24, in the long run
    expected = _plain(_orders())
    for rank in range(WORKERS):
        found = torch.load(f"weights-{rank}")
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


def test_a_resumed_job_goes_on_behind_the_samples_that_were_drawn(tmp_path: Path) -> None:
    drawn = []
    for first, last, options in ((0, 7, {}), (7, 20, {"resume": tmp_path}), (0, 20, {})):
        model = torch.nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with fastps.DistributedOptimizer(inner, sync="bsp,tune=true", batch_size=8, **options) as optimizer:
            loader = fastps.shard(DataLoader(TensorDataset(torch.arange(42.0)), batch_size=8, shuffle=True), optimizer)
            found: list[list[float]] = []
            while len(found) < last - first:
                for (numbers,) in loader:
                    found.append(numbers.tolist())
                    optimizer.zero_grad()
                    model(numbers[:, None].expand(-1, 2)).sum().backward()
                    optimizer.step()
                    if len(found) == last - first:
                        break
            fastps.save(optimizer, tmp_path)
        drawn.append(found)
    assert drawn[0] + drawn[1] == drawn[2]
    assert all(len(batch) == 8 for batch in drawn[2]), "one worker has the whole sum"


def test_a_script_that_tells_its_batches_is_believed_and_one_that_follows_no_grant_has_its_first() -> None:
    model = torch.nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with fastps.DistributedOptimizer(inner, sync="bsp,tune=true", batch_size=8) as optimizer:
        for told in (0, 5, 0):
            optimizer.zero_grad()
            model(torch.ones(3, 2)).sum().backward()
            optimizer.report_loss(1.0, told)
            optimizer.step()
        assert optimizer.statistics()[0].samples == 8 + 5 + 8


@pytest.mark.slow
def test_a_recorded_run_is_played_again_with_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.replace("LOADER", LOADERS["shard"]).replace("OPTIMIZER", "torch.optim.SGD")
    script = program(tmp_path, text.replace("drawn-", "drawn-{os.environ['KEPT']}-"))[1]
    commands.done("run", "-n", str(WORKERS), "--sync", "bsp,tune=true", "--trace", "run.trace", script, KEPT="live")
    shown = commands.done("replay", "run.trace", script, KEPT="again").stdout
    assert f"{STEPS * WORKERS} of gradients are equal" in shown.replace("\n", " ")
    for rank in range(WORKERS):
        assert Path(f"drawn-live-{rank}").read_text() == Path(f"drawn-again-{rank}").read_text()
