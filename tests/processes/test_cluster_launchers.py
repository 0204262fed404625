"""The batch script of SLURM and the manifest of Kubernetes in examples/launchers, run here as two nodes.

What `srun` and an indexed job set is set by the tests; the commands are those of the files.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastps.system.ports import free_port
from tests.support.scripts import output, started

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "launchers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not EXAMPLES.exists(), reason="tests run without the source tree"),
]

# A stand-in for srun: two nodes, which are both this machine, with the variables of one task on each.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
for node in 0 1; do
    SLURM_STEP_ID=$STEP SLURM_PROCID=$node SLURM_LOCALID=0 SLURM_NODEID=$node SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 \\
        SLURM_STEP_TASKS_PER_NODE='1(x2)' SLURM_STEP_NODELIST=localhost,other "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a program that no launcher has started, with `fastps` on its path, and these variables."""
    told = re.compile(r"FASTPS_|RANK$|LOCAL_RANK$|WORLD_SIZE$|MASTER_|TORCHELASTIC_|SLURM_|OMPI_|PMI|JOB_COMPLETION")
    kept = {name: value for name, value in os.environ.items() if not told.match(name)}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "OMP_NUM_THREADS": "1", **variables}


def _program(folder: Path) -> Path:
    """A folder with examples/resume.py, in which a batch job begins."""
    (folder / "examples").mkdir(parents=True)
    (folder / "examples" / "resume.py").write_text((ROOT / "examples" / "resume.py").read_text())
    return folder


def _workers(output: str) -> list[tuple[int, str]]:
    """The ranks of the workers that came to the end, and the sums of their weights."""
    found = re.findall(r"worker (\d+): loss [\d.]+, weights ([\d.]+)", output)
    return sorted((int(rank), weights) for rank, weights in found)


def _sbatch(folder: Path, step: int) -> str:
    """What the batch script writes when SLURM runs it, with two processors for each task."""
    stand_ins = folder / "bin"
    stand_ins.mkdir(exist_ok=True)
    (stand_ins / "srun").write_text(SRUN)
    (stand_ins / "srun").chmod(0o755)
    variables = environment(SLURM_JOB_ID=str(os.getpid()), SLURM_CPUS_PER_TASK="2", STEP=str(step))
    variables["PATH"] = f"{stand_ins}:{variables['PATH']}"
    return output(["bash", str(EXAMPLES / "train.sbatch")], cwd=folder, env=variables)


def _check_that_it_goes_on(start: Callable[[int], str], checkpoints: Path) -> None:
    """Start a job twice, the second time without its last checkpoint."""
    first = _workers(start(0))
    assert [rank for rank, _ in first] == [0, 1, 2, 3]
    assert len({weights for _, weights in first}) == 1, "all workers of both nodes end with the same weights"
    written = sorted(checkpoints.iterdir())
    assert [each.name for each in written] == ["checkpoint-000002", "checkpoint-000003"]
    shutil.rmtree(written[-1])
    again = start(1)
    assert "goes on at step 200" in again
    assert _workers(again) == first, "bsp makes the same steps again"


def test_the_batch_script_trains_on_two_nodes_and_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    folder = _program(tmp_path / "work")
    _check_that_it_goes_on(partial(_sbatch, folder), folder / "runs" / str(os.getpid()))


def test_options_of_the_batch_script_fit_each_other() -> None:
    text = (EXAMPLES / "train.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert options["ntasks-per-node"] == "1", "one `fastps run` for each node"
    assert subprocess.run(["bash", "-n", str(EXAMPLES / "train.sbatch")], check=False).returncode == 0
    assert '--cpus-per-task="$SLURM_CPUS_PER_TASK"' in text, "srun does not take it over from sbatch since SLURM 22.05"


def _manifest() -> tuple[Any, Any]:
    """The service and the job."""
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    return service, job


def test_the_manifest_gives_each_pod_a_number_and_a_name() -> None:
    service, job = _manifest()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (command,) = container["args"]
    found = re.search(r"--nnodes (\d+) --rendezvous (\S+)-0\.(\S+):(\d+) -n (\d+)", command)
    assert found, command
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(found[1]), "a pod for each node, all at the same time"
    assert (found[2], found[3]) == (job["metadata"]["name"], service["metadata"]["name"]), "pod 0's name"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert container["resources"]["limits"]["cpu"] == found[5], "a processor for each worker"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_pods_train_as_one_job_and_go_on_from_its_checkpoint(tmp_path: Path) -> None:
    _, job = _manifest()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    folder = _program(tmp_path / "work")

    def pods(_step: int) -> str:
        """What both pods write: their command, with this machine as pod 0, and the volume as a folder."""
        command = container["args"][0].replace("train-0.fastps:29400", f"127.0.0.1:{free_port()}")
        command = command.replace("/runs", str(tmp_path / "runs")).replace("-n 4", "-n 2")
        variables = {each["name"]: each["value"] for each in container["env"]}
        (tmp_path / "runs").mkdir(exist_ok=True)
        return _together([*container["command"], command], folder, [{**variables, "JOB_COMPLETION_INDEX": i} for i in "01"])

    _check_that_it_goes_on(pods, tmp_path / "runs" / "train")


def _together(command: Sequence[str], folder: Path, nodes: Sequence[Mapping[str, str]]) -> str:
    """The output of the same command with each node's variables."""
    running = [started(command, cwd=folder, env=environment(**own), stderr=subprocess.STDOUT) for own in nodes]
    printed = [each.communicate(timeout=180)[0] for each in running]
    assert [each.returncode for each in running] == [0, 0], printed
    return "".join(printed)
