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

ray = pytest.importorskip("ray", reason="the extra fastps[ray] is not installed")
train: Any = pytest.importorskip("ray.train", reason="the extra fastps[ray] is not installed")

PROGRAM, PLAIN = "ray_train_digits.py", "ray_train_digits_plain.py"


@pytest.fixture
def cluster() -> Iterator[None]:
    """A Ray cluster of one node, on this machine, that says it has two GPUs."""
    with ray_cluster.cluster(ray, num_gpus=2):
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


def _step(model: torch.nn.Module, optimizer: Any, inputs: torch.Tensor | None = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4) if inputs is None else inputs).sum().backward()
    optimizer.step()


# -- what users expect -----------------------------------------------------------------------------


def _passes_over_shares(config: dict[str, Any]) -> dict[str, Any]:
    """Two passes over 40 numbered samples; the samples that this worker saw, and what its environment says."""
    samples = torch.arange(40.0).view(-1, 1).expand(-1, 4)
    loader = integration.prepare_data_loader(DataLoader(TensorDataset(samples), batch_size=5, shuffle=True))
    model = integration.prepare_model(torch.nn.Linear(4, 1))
    optimizer = _wrap(model)
    seen = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for (batch,) in loader:
            _step(model, optimizer, batch)
            seen += batch[:, 0].int().tolist()
    optimizer.wait_for_others()
    context = train.get_context()
    found = {"rank": fastps.rank(), "workers": fastps.world_size(), "version": optimizer.version, "seen": seen}
    Path(config["folder"], f"rank{context.get_world_rank()}").write_text(json.dumps(found))
    return {**found, "job": os.environ["FASTPS_JOB"], "sync": optimizer.worker.store.layout.policy.spec}


@pytest.mark.usefixtures("cluster")
def test_workers_of_a_node_are_one_job_and_share_the_samples(tmp_path: Path) -> None:
    result = _fit(_passes_over_shares, tmp_path, sync="asp")
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [each["rank"] for each in found] == [0, 1] and {each["workers"] for each in found} == {2}
    assert {each["version"] for each in found} == {2 * 2 * 4}, "each push of each worker is an update, once"
    assert sorted(found[0]["seen"][:20] + found[1]["seen"][:20]) == list(range(40)), "an epoch has each sample once"
    assert found[0]["seen"][:20] != found[0]["seen"][20:], "set_epoch draws another order"
    assert result.return_value["sync"] == "asp"
    assert not [job for job in discovery.listening() if job.startswith(result.return_value["job"])], "the loop's end closes it"


def _resumes(config: dict[str, Any]) -> str:
    """Four epochs of ten steps with a checkpoint each; worker 1 of the first group is killed in the third."""
    model = torch.nn.Linear(4, 1)
    inner, begin = torch.optim.Adam(model.parameters(), lr=0.01), 0
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(saved["model"])
        inner.load_state_dict(saved["optimizer"])
        begin = saved["epoch"] + 1
    optimizer = fastps.DistributedOptimizer(inner, model=model)
    job = os.environ["FASTPS_JOB"]
    for epoch in range(begin, 4):
        for _ in range(10):
            _step(model, optimizer)
        if epoch == 2 and begin == 0 and fastps.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        _report(model, optimizer, {"epoch": epoch, "begin": begin, "job": job})
    return job


def _report(model: torch.nn.Module, optimizer: Any, metrics: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if train.get_context().get_world_rank() == 0:
            steps = float(optimizer.state_dict()["state"][0]["step"])
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": metrics["epoch"]}
            torch.save(saved, Path(folder) / "state.pt")
            checkpoint = train.Checkpoint.from_directory(folder)
            metrics = {**metrics, "steps": steps}
        train.report(metrics, checkpoint=checkpoint)


@pytest.mark.usefixtures("cluster")
def test_group_restarts_after_a_death_as_a_new_job_from_the_newest_checkpoint(tmp_path: Path) -> None:
    result = _fit(_resumes, tmp_path, failures=1)
    assert result.metrics["epoch"] == 3 and result.metrics["begin"] in (1, 2), "it began from a checkpoint of the first group"
    assert result.metrics["steps"] == 40, "bsp makes a step of the optimizer for each of 40 steps, across the restart"
    jobs = {metrics["job"] for _, metrics in result.best_checkpoints}
    assert len(jobs) == 2 and result.return_value == result.metrics["job"]
    assert not [job for job in discovery.listening() if job.startswith(tuple(jobs))], "nothing is left behind"


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(600)  # two groups of workers, one after the other, whose processes import Ray and torch
def test_lost_worker_is_named_at_the_driver(tmp_path: Path) -> None:
    def loop(end: Callable[[], None], config: dict[str, Any]) -> None:
        model = torch.nn.Linear(4, 1)
        optimizer = _wrap(model)
        for step in range(10**6):
            _step(model, optimizer)
            if step == 5 and fastps.rank() == 1:
                end()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def fail() -> None:
        raise ValueError("bad data")

    for end, pattern in ((kill, "worker 1 .*died"), (fail, "worker 1 (.*) failed: ValueError: bad data")):
        with pytest.raises(train.WorkerGroupError) as caught:
            _fit(functools.partial(loop, end), tmp_path)
        error = caught.value.__cause__
        if error is None and end is fail:  # Ray saw worker 1's own error before worker 0's
            assert "bad data" in str(caught.value.worker_failures[1])
        else:
            assert type(error) is fastps.WorkerDiedError and error.worker == 1
            assert re.search(pattern, str(error))


def test_a_loss_is_named_whatever_ray_saw_first() -> None:
    own, gone = fastps.WorkerDiedError("worker 1 died", 1), ray.exceptions.RayActorError()
    assert integration.loss_of({0: own, 1: gone}) is own
    found = integration.loss_of({1: gone, 2: gone})
    assert type(found) is fastps.WorkerDiedError and found.worker == 1
    assert integration.loss_of({0: ValueError("bad data")}) is None


@pytest.mark.usefixtures("cluster")
@pytest.mark.timeout(600)  # two groups of workers, one after the other, whose processes import Ray and torch
def test_an_elastic_group_is_a_job_of_the_size_that_it_starts_with_and_pushes_its_shards_of_ray_data(tmp_path: Path) -> None:
    import numpy as np
    import ray.data

    def loop(config: dict[str, Any]) -> tuple[int, int, int]:
        model, rows = torch.nn.Linear(4, 1), 0
        optimizer = _wrap(model)
        for batch in train.get_dataset_shard("train").iter_torch_batches(batch_size=8, dtypes=torch.float32):
            _step(model, optimizer, batch["data"])
            rows += len(batch["data"])
        optimizer.wait_for_others()
        return fastps.world_size(), rows, optimizer.version

    datasets = {"train": ray.data.from_numpy(np.ones((120, 4), np.float32))}
    assert _fit(loop, tmp_path, sync="asp", workers=(1, 3), datasets=datasets).return_value == (3, 40, 15)
    alone = _fit(loop, tmp_path, sync="asp", workers=0, datasets=datasets).return_value
    assert alone == (1, 120, 15), "Ray's local mode: the loop runs here, alone"


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.usefixtures("cluster")
def test_gpus_that_torch_does_not_find_are_refused_in_one_sentence(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch finds a GPU here")
    with pytest.raises(train.ControllerError, match="use_gpu=True: expected torch to find a GPU in every worker") as caught:
        _fit(_passes_over_shares, tmp_path, scaling={"use_gpu": True, "resources_per_worker": {"CPU": 0.25, "GPU": 1}})
    assert isinstance(caught.value.controller_failure, fastps.UnsupportedError)


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
    own = integration.variables_of(_places(("10.0.0.1", 1), ("10.0.0.2", 2)), "job", None, "10.0.0.1:4000")
    names = ("FASTPS_RANK", "FASTPS_NODE_RANK", "FASTPS_LOCAL_RANK", "FASTPS_LOCAL_WORKERS", "FASTPS_NNODES", "FASTPS_WORKERS")
    assert [[each[name] for name in names] for each in own] == [list("000123"), list("110223"), list("211223")]
    assert {each["FASTPS_RENDEZVOUS"] for each in own} == {"10.0.0.1:4000"} and "FASTPS_SYNC" not in own[0]
    alone = integration.variables_of(_places(("10.0.0.1", 1)), "job", "asp")[0]
    assert (alone["FASTPS_NNODES"], alone["FASTPS_RENDEZVOUS"], alone["FASTPS_SYNC"]) == ("1", None, "asp")


def test_wrong_arguments_are_refused_before_anything_starts() -> None:
    with pytest.raises(fastps.PolicyError, match="dssq"):
        FastpsTrainer(lambda: None, sync="dssq:3,15")
    config = train.ScalingConfig(num_workers=1, use_tpu=True)
    with pytest.raises(fastps.UnsupportedError, match="expected workers on CPUs or GPUs"):
        FastpsTrainer(lambda: None, scaling_config=config)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            "sys.modules['ray'] = None",
            "FastpsTrainer: expected Ray Train 2.50 or newer, found ModuleNotFoundError.*'.\\[ray\\]'",
        ),
        ("os.environ['RAY_TRAIN_V2_ENABLED'] = '0'", "FastpsTrainer: expected Ray Train V2, found V1 .*RAY_TRAIN_V2_ENABLED=1"),
        ("import ray.train.backend as b; del b.Backend", "found ImportError: cannot import name 'Backend'"),
    ],
    ids=["not installed", "V1", "a name is missing"],
)
def test_a_ray_that_does_not_fit_is_named_at_the_first_use(before: str, message: str) -> None:
    code = f"import os, sys; {before}\nfrom fastps.integrations.ray import FastpsTrainer\nFastpsTrainer(print)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
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


@pytest.mark.usefixtures("two_nodes")
def test_workers_of_two_nodes_train_over_the_network_and_start_anew_after_a_death(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> tuple[int, ...]:
        context, killed = train.get_context(), Path(config["folder"], "killed")
        model = torch.nn.Linear(4, 1)
        optimizer = _wrap(model)
        for step in range(20):
            _step(model, optimizer)
            if step == 5 and fastps.rank() == 3 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.wait_for_others()
        return context.get_local_world_size(), fastps.world_size(), int(os.environ["FASTPS_NNODES"]), optimizer.version

    scaling = {"resources_per_worker": {"CPU": 0.5}}
    assert _fit(loop, tmp_path, workers=4, failures=1, scaling=scaling).return_value == (2, 4, 2, 20)
    assert (tmp_path / "killed").exists()
    commands = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]  # None of one that has ended
    left = [command for command in commands if "fastps.network.agent" in command]
    assert not left, "the agents of both groups have ended"


# -- the example -----------------------------------------------------------------------------------


def _run(program: str, folder: Path, *arguments: str) -> list[float]:
    """The accuracies that an example prints, in percent, one for each seed."""
    command = [sys.executable, str(example_programs.EXAMPLES / program), "--storage", str(folder), *arguments]
    environment = {**os.environ, **ray_cluster.SETTING, "RAY_ADDRESS": "local"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
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
