"""Ray Train with fastps: what its users expect of a trainer, failures, several nodes, and what is refused."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import fastps
from fastps.integrations import ray as integration
from fastps.integrations.ray import FastpsTrainer, Place
from fastps.membership import discovery
from tests.support import example_programs, ray_cluster
from tests.support.torch_optimizers import steps_on

ray = pytest.importorskip("ray", reason="the extra fastps[ray] is not installed")
train: Any = pytest.importorskip("ray.train", reason="the extra fastps[ray] is not installed")

PROGRAM, PLAIN = "ray_train_digits.py", "ray_train_digits_plain.py"


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray cluster of one node, on this machine, that says it has a GPU."""
    with ray_cluster.cluster(ray, num_gpus=1):
        yield


def _fit(loop: Any, folder: Path, *, sync: str | None = "bsp", workers: Any = 2, failures: int = 0, **options: Any) -> Any:
    scaling = options.pop("scaling", {})
    trainer = FastpsTrainer(
        loop,
        train_loop_config={"folder": str(folder)},
        sync=sync,
        scaling_config=train.ScalingConfig(num_workers=workers, **{"resources_per_worker": {"CPU": 0.25}, **scaling}),
        run_config=train.RunConfig(storage_path=str(folder), failure_config=train.FailureConfig(max_failures=failures)),
        **options,
    )
    return trainer.fit()


def _wrap(model: torch.nn.Module) -> Any:
    return fastps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)


def _step(model: torch.nn.Module, optimizer: Any, inputs: torch.Tensor | None = None, steps: int = 1) -> None:
    steps_on(model, optimizer, torch.ones(2, 4) if inputs is None else inputs, steps)


# -- what users expect -----------------------------------------------------------------------------


def _passes_over_shares(config: dict[str, Any]) -> dict[str, Any]:
    """Two passes over 40 numbered samples, then one over a shard of Ray's data; what this worker saw, and who it is."""
    samples = torch.arange(40.0).view(-1, 1).expand(-1, 4)
    loader = integration.prepare_data_loader(DataLoader(TensorDataset(samples), batch_size=5, shuffle=True))
    model = integration.prepare_model(torch.nn.Linear(4, 1))
    optimizer, seen, rows = _wrap(model), [], 0
    for epoch in range(2):
        if fastps.world_size() > 1:  # alone the loader stays as it is
            loader.sampler.set_epoch(epoch)
        for (batch,) in loader:
            _step(model, optimizer, batch)
            seen += batch[:, 0].int().tolist()
    for batch in train.get_dataset_shard("train").iter_torch_batches(batch_size=8, dtypes=torch.float32):
        _step(model, optimizer, batch["data"])
        rows += len(batch["data"])
    optimizer.wait_for_others()
    found = {"rank": fastps.rank(), "workers": fastps.world_size(), "version": optimizer.version, "seen": seen, "rows": rows}
    Path(config["folder"], f"rank{train.get_context().get_world_rank()}").write_text(json.dumps(found))
    return {**found, "job": os.environ.get("FASTPS_JOB"), "sync": optimizer.worker.store.layout.policy.spec}


def _ends(end: Callable[[], None], config: dict[str, Any]) -> None:
    """Worker 1 ends after six steps, and the others train on."""
    model = torch.nn.Linear(4, 1)
    optimizer = _wrap(model)
    _step(model, optimizer, steps=6)
    if fastps.rank() == 1:
        end()
    _step(model, optimizer, steps=10**6)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fail() -> None:
    raise ValueError("bad data")


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(900)  # four groups of workers, one after the other, whose processes import Ray and torch
def test_a_group_shares_its_samples_a_lost_worker_is_named_and_missing_gpus_are_refused(tmp_path: Path) -> None:
    """An elastic group is a job of the size that it starts with. One cluster, because it takes longest to start."""
    import numpy as np
    import ray.data

    datasets = {"train": ray.data.from_numpy(np.ones((120, 4), np.float32))}
    returned = _fit(_passes_over_shares, tmp_path, sync="asp", workers=(1, 2), datasets=datasets).return_value
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [(each["rank"], each["workers"], each["rows"]) for each in found] == [(0, 2, 60), (1, 2, 60)]
    assert {each["version"] for each in found} == {2 * (2 * 4 + 8)}, "each push of each worker is an update, once"
    assert sorted(found[0]["seen"][:20] + found[1]["seen"][:20]) == list(range(40)), "an epoch has each sample once"
    assert found[0]["seen"][:20] != found[0]["seen"][20:], "set_epoch draws another order"
    assert returned["sync"] == "asp"
    assert not [job for job in discovery.listening() if job.startswith(returned["job"])], "the loop's end closes it"
    alone = _fit(_passes_over_shares, tmp_path, sync="asp", workers=0, datasets=datasets).return_value
    assert (alone["workers"], alone["rows"], alone["version"]) == (1, 120, 16 + 15), "Ray's local mode: the loop runs here"
    assert alone["sync"] == "asp" and "FASTPS_SYNC" not in os.environ, "and the discipline is the trainer's there, too"

    for end, pattern in ((_kill, "worker 1 .*died"), (_fail, "worker 1 (.*) failed: ValueError: bad data")):
        with pytest.raises(train.WorkerGroupError) as caught:
            _fit(functools.partial(_ends, end), tmp_path)
        error = caught.value.__cause__
        if error is None and end is _fail:  # Ray saw worker 1's own error before worker 0's
            assert "bad data" in str(caught.value.worker_failures[1])
        else:
            assert type(error) is fastps.WorkerDiedError and error.worker == 1
            assert re.search(pattern, str(error))

    if not torch.cuda.is_available():
        options = {"workers": 1, "scaling": {"use_gpu": True, "resources_per_worker": {"CPU": 0.25, "GPU": 1}}}
        with pytest.raises(train.ControllerError, match="expected torch to find a GPU in every worker") as refused:
            _fit(functools.partial(_ends, _fail), tmp_path, **options)
        assert isinstance(refused.value.controller_failure, fastps.UnsupportedError)


def test_a_loss_is_named_whatever_ray_saw_first() -> None:
    own, gone = fastps.WorkerDiedError("worker 1 died", 1), ray.exceptions.RayActorError()
    assert integration.loss_of({0: own, 1: gone}) is own
    found = integration.loss_of({1: gone, 2: gone})
    assert type(found) is fastps.WorkerDiedError and found.worker == 1
    assert integration.loss_of({0: ValueError("bad data")}) is None


# -- what is refused -------------------------------------------------------------------------------


def _places(*nodes: tuple[str, int], **changes: Any) -> list[Place]:
    """Workers on machines with these addresses, so many on each."""
    return [
        Place(**{**vars(Place(f"host{node}", address, node, local, count, ("net:[1]", "pid:[2]"), "1.0", True)), **changes})
        for node, (address, count) in enumerate(nodes)
        for local in range(count)
    ]


def test_workers_that_cannot_be_one_job_are_refused_in_one_sentence() -> None:
    check = integration.check_places
    check(_places(("10.0.0.1", 2)), uses_gpus=True)
    check(_places(("10.0.0.1", 1), ("10.0.0.2", 3)), uses_gpus=False)
    with pytest.raises(fastps.UnsupportedError, match="expected all workers on one node, found 2 nodes"):
        check(_places(("10.0.0.1", 1), ("10.0.0.2", 1)), uses_gpus=True)
    with pytest.raises(fastps.UnsupportedError, match="found none on host0"):
        check(_places(("10.0.0.1", 2), has_gpu=False), uses_gpus=True)
    one = _places(("10.0.0.1", 1), version="1.0") + _places(("10.0.0.2", 1), version="1.1")
    with pytest.raises(fastps.UnsupportedError, match=r"the same version of fastps on all workers, found 1\.0 and 1\.1"):
        check(one, uses_gpus=False)
    pods = [*_places(("10.0.0.1", 2))[:1], _places(("10.0.0.1", 2), namespaces=("net:[1]", "pid:[3]"))[1]]
    with pytest.raises(fastps.UnsupportedError, match=r"workers on 10\.0\.0\.1 to see each other's processes"):
        check(pods, uses_gpus=False)
    mixed = _places(("10.0.0.1", 2), ("10.0.0.2", 1))
    with pytest.raises(fastps.UnsupportedError, match="one Ray node for each machine"):
        check([mixed[0], mixed[2], mixed[1]], uses_gpus=False)


def test_variables_number_the_workers_of_all_nodes() -> None:
    own = integration.variables_of(_places(("10.0.0.1", 1), ("10.0.0.2", 2)), "job", "10.0.0.1:4000")
    names = ("FASTPS_RANK", "FASTPS_NODE_RANK", "FASTPS_LOCAL_RANK", "FASTPS_LOCAL_WORKERS", "FASTPS_NNODES", "FASTPS_WORKERS")
    assert [[each[name] for name in names] for each in own] == [list("000123"), list("110223"), list("211223")]
    assert {each["FASTPS_RENDEZVOUS"] for each in own} == {"10.0.0.1:4000"}
    alone = integration.variables_of(_places(("10.0.0.1", 1)), "job")[0]
    assert (alone["FASTPS_NNODES"], alone["FASTPS_RENDEZVOUS"]) == ("1", None)


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(fastps.PolicyError, match="dssq"):
        FastpsTrainer(lambda: None, sync="dssq:3,15")
    config = train.ScalingConfig(num_workers=1, use_tpu=True)
    with pytest.raises(fastps.UnsupportedError, match="expected workers on CPUs or GPUs"):
        FastpsTrainer(lambda: None, scaling_config=config)


@pytest.mark.parametrize(("before", "message"), [
    ("sys.modules['ray'] = None", r"FastpsTrainer: expected Ray Train 2.50 or newer, found ModuleNotFoundError.*'.\[ray\]'"),
    ("os.environ['RAY_TRAIN_V2_ENABLED'] = '0'", "FastpsTrainer: expected Ray Train V2, found V1 .*RAY_TRAIN_V2_ENABLED=1"),
    ("import ray.train.backend as b; del b.Backend", "found ImportError: cannot import name 'Backend'"),
], ids=["not installed", "V1", "a name is missing"])  # fmt: skip
def test_a_ray_that_does_not_fit_is_named_at_the_first_use(before: str, message: str) -> None:
    code = f"import os, sys; {before}\nfrom fastps.integrations.ray import FastpsTrainer\nFastpsTrainer(print)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.search(message, ended.stderr.splitlines()[-1]), ended.stderr


def test_a_share_of_a_loader_keeps_what_the_loader_was_given() -> None:
    data = TensorDataset(torch.arange(10.0))
    shares = [integration._shared_loader(DataLoader(data, batch_size=2, drop_last=True), rank, 2) for rank in range(2)]
    assert [[batch.tolist() for (batch,) in share] for share in shares] == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    with pytest.raises(fastps.UnsupportedError, match="found one with WeightedRandomSampler"):
        integration._shared_loader(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 10, 10)), 0, 2)
    with pytest.raises(fastps.UnsupportedError, match="found one with a batch_sampler"):
        integration._shared_loader(DataLoader(data, batch_sampler=[[0, 1]]), 0, 2)


# -- several nodes ---------------------------------------------------------------------------------


@pytest.fixture
def two_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes with an address each, on this machine."""
    from ray.cluster_utils import Cluster

    os.environ.update(ray_cluster.SETTING)
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "node_ip_address": "127.0.0.2"}
    )
    try:
        nodes.add_node(num_cpus=1, node_ip_address="127.0.0.3")
        nodes.wait_for_nodes()
        ray.init(address=nodes.address, _node_ip_address="127.0.0.2", log_to_driver=False, configure_logging=False)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


def _resumes(config: dict[str, Any]) -> tuple[int, int, str]:
    """Four epochs of ten steps with a checkpoint each; worker 1 of the first group is killed in the third."""
    model, begin, rank = torch.nn.Linear(4, 1), 0, fastps.rank()
    torch.nn.init.zeros_(model.weight)
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(saved["model"])
        begin = saved["epoch"] + 1
    optimizer = _wrap(model)
    for epoch in range(begin, 4):
        _step(model, optimizer, steps=10)
        if epoch == 2 and begin == 0 and rank == 1:
            _kill()
        with tempfile.TemporaryDirectory() as folder:
            torch.save({"model": model.state_dict(), "epoch": epoch}, Path(folder) / "state.pt")
            checkpoint = train.Checkpoint.from_directory(folder) if rank == 0 else None
            metrics = {"epoch": epoch, "begin": begin, "job": os.environ["FASTPS_JOB"], "weight": float(model.weight[0, 0])}
            train.report(metrics, checkpoint=checkpoint)
    return fastps.world_size(), int(os.environ["FASTPS_NNODES"]), os.environ["FASTPS_JOB"]


@pytest.mark.usefixtures("two_nodes")
@pytest.mark.timeout(600)  # two groups of workers, one after the other, whose processes import Ray and torch
def test_workers_of_two_nodes_restart_after_a_death_as_a_new_job_from_the_newest_checkpoint(tmp_path: Path) -> None:
    result = _fit(_resumes, tmp_path, workers=3, failures=1, scaling={"resources_per_worker": {"CPU": 0.5}})
    assert result.return_value == (3, 2, result.metrics["job"]), "two workers on one node, and one on the other"
    assert result.metrics["epoch"] == 3 and result.metrics["begin"] in (1, 2), "it began from a checkpoint of the first group"
    assert result.metrics["weight"] == pytest.approx(-40 * 0.01 * 2), "bsp makes a step of the optimizer for each of 40 steps"
    jobs = {metrics["job"] for _, metrics in result.best_checkpoints}
    assert len(jobs) == 2
    assert not [job for job in discovery.listening() if job.startswith(tuple(jobs))], "nothing is left behind"
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]  # None of one that has ended
    left = [command for command in commands if "fastps.network.agent" in command]
    assert not left, "the agents of both groups have ended"


# -- the example -----------------------------------------------------------------------------------


def _run(program: str, folder: Path, *arguments: str) -> list[float]:
    """The accuracies that an example prints, in percent, one for each seed."""
    command = [sys.executable, str(example_programs.EXAMPLES / program), "--storage", str(folder), *arguments]
    environment = {**os.environ, **ray_cluster.SETTING, "RAY_ADDRESS": "local"}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    return [float(each) for each in re.findall(r"^seed \d+: ([\d.]+)%", ended.stdout, re.M)]


def test_three_lines_turn_the_plain_program_into_the_example() -> None:
    plain, own = ((example_programs.EXAMPLES / name).read_text().splitlines() for name in (PLAIN, PROGRAM))
    assert len(plain) == len(own) - 1, "the formatter sets a blank line before the import of fastps"
    assert 0 < len(set(own) - set(plain) - {f"python examples/{PROGRAM} --workers 4"}) <= 3
    assert 0 < len(set(plain) - set(own) - {f"python examples/{PLAIN} --workers 1"}) <= 3


def test_the_example_learns_at_a_small_size(tmp_path: Path) -> None:
    (accuracy,) = _run(PROGRAM, tmp_path, "--workers", "2", "--epochs", "3")
    assert accuracy > 60, "chance has 10 %"
