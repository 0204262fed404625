"""What launchers of several processes say, by their variables: SLURM, Open MPI, MPICH, Kubernetes."""

import re

import pytest

from fastps.errors import UsageError
from fastps.job.environment import identity, rank, world_size
from fastps.job.launchers import Launched, LauncherPlace, first_host, launched, launcher_place, tasks_of_nodes
from fastps.job.nodes import Nodes, nodes_of_environment
from tests.job.conftest import Environment

SLURM = {
    "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "3", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_STEP_NODELIST": "node[01-02,07]", "SLURM_JOB_NODELIST": "login,node[01-99]",
    "SLURM_NTASKS": "400", "SLURM_NNODES": "100", "SLURM_TASKS_PER_NODE": "4(x100)",
}  # fmt: skip
OPEN_MPI = {
    "PMIX_NAMESPACE": "prterun-a-1@1", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
}  # fmt: skip
ONE_TASK = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_a_step_of_slurm_counts_and_not_its_whole_job(environment: Environment) -> None:
    environment(SLURM)
    assert (rank(), world_size()) == (5, 11)
    nodes = nodes_of_environment()
    assert nodes == Nodes(3, 1, 1, 4, "node01", 20000 + (812 * 64 + 3) % 10000, launched=launched())


def test_the_processes_of_one_launch_derive_one_job_and_those_of_another_step_another(environment: Environment) -> None:
    environment(SLURM)
    first = identity().job
    environment({"SLURM_PROCID": "6"})
    assert identity().job == first
    environment({"SLURM_STEP_ID": "4"})
    assert identity().job != first


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA])
def test_mpi_says_which_process_and_not_which_node(environment: Environment, variables: dict[str, str]) -> None:
    environment(variables, {"FASTPS_RENDEZVOUS": "a:7000"})
    assert (rank(), world_size()) == (2, 3)
    nodes = nodes_of_environment()
    assert nodes is not None
    assert (nodes.count, nodes.number, nodes.local_rank, nodes.local_workers) == (0, -1, 1, 2)
    assert (nodes.host, nodes.port) == ("a", 7000)


def test_processes_of_one_node_are_a_job_of_one_node(environment: Environment) -> None:
    environment(OPEN_MPI, {"OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "2"})
    assert nodes_of_environment() is None
    assert (identity().rank, identity().workers) == (2, 3)


@pytest.mark.parametrize("inner", [
    {"FASTPS_RANK": "0", "FASTPS_WORKERS": "4"},  # fastps run in a process of srun
    {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "1"},  # torchrun in one
    {"RANK": "5", "WORLD_SIZE": "8"},
])  # fmt: skip
def test_a_launcher_inside_a_process_of_slurm_counts(environment: Environment, inner: dict[str, str]) -> None:
    environment(SLURM, inner)
    assert launched() is None
    assert nodes_of_environment() is None
    assert world_size() == int(inner.get("FASTPS_WORKERS", inner.get("WORLD_SIZE", "")))


def test_a_script_that_repeats_slurms_numbers_for_torch_is_still_slurms(environment: Environment) -> None:
    environment(SLURM, {"RANK": "5", "WORLD_SIZE": "11", "MASTER_ADDR": "node01", "MASTER_PORT": "29500"})
    nodes = nodes_of_environment()
    assert nodes is not None
    assert (nodes.count, nodes.number) == (3, 1)


def test_a_batch_script_of_slurm_is_one_process(environment: Environment) -> None:
    """It has SLURM_PROCID and the numbers of the whole job, and no step."""
    environment({name: value for name, value in SLURM.items() if "STEP" not in name})
    assert (rank(), world_size(), nodes_of_environment()) == (0, 1, None)


def test_a_step_of_one_task_is_alone(environment: Environment) -> None:
    environment(SLURM, ONE_TASK)
    assert launched() is None
    assert identity().job != identity().job, "several may run side by side"


@pytest.mark.parametrize("variables", [OPEN_MPI, HYDRA])
def test_several_processes_that_mpi_starts_inside_a_step_of_one_task_are_one_job(
    environment: Environment, variables: dict[str, str]
) -> None:
    environment(SLURM, ONE_TASK, variables)
    assert (rank(), world_size()) == (2, 3)


def test_a_local_rank_beside_slurms_numbers_is_not_the_rank(environment: Environment) -> None:
    environment(SLURM, {"LOCAL_RANK": SLURM["SLURM_LOCALID"]})
    assert (rank(), world_size()) == (5, 11)
    environment(ONE_TASK)
    assert rank() == 1, "Lightning started this process"


@pytest.mark.parametrize(("variables", "message"), [
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "SLURM_STEP_TASKS_PER_NODE to give the 11 tasks of each node, found"),
    ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "four"}, "tasks of nodes such as 4(x2),3, as SLURM gives them, found 'four'"),
    ({**SLURM, "SLURM_LOCALID": "x"}, "expected SLURM_LOCALID to be a whole number, found 'x'"),
    (OPEN_MPI, "set FASTPS_RENDEZVOUS=HOST:PORT for all of them"),
])  # fmt: skip
def test_variables_that_say_too_little_are_refused(environment: Environment, variables: dict[str, str], message: str) -> None:
    environment(variables)
    with pytest.raises(UsageError, match=re.escape(message)):
        nodes_of_environment()


def test_a_launch_without_a_name_is_refused(environment: Environment) -> None:
    environment(HYDRA)
    with pytest.raises(UsageError, match="gives their launch no name: set FASTPS_JOB"):
        identity()
    environment({"FASTPS_RENDEZVOUS": "a:7000"})
    assert identity().rank == 2


TWO_TASKS = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(("variables", "expected"), [
    ({}, LauncherPlace()),
    ({"JOB_COMPLETION_INDEX": "1"}, LauncherPlace(node=1)),
    ({**SLURM, **TWO_TASKS}, LauncherPlace(2, 1, "node01:21971")),
    ({**HYDRA, "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0"}, LauncherPlace(3, 2, "")),
])  # fmt: skip
def test_a_launcher_of_one_node_finds_its_place(variables: dict[str, str], expected: LauncherPlace) -> None:
    assert launcher_place(variables) == expected


@pytest.mark.parametrize("variables", [SLURM, OPEN_MPI])
def test_two_launchers_on_a_node_are_refused(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"expected one `fastps run` for each node"):
        launcher_place(variables)


def test_short_forms_of_slurm_are_read() -> None:
    assert tasks_of_nodes("1") == [1]
    assert tasks_of_nodes("2(x3),1,4") == [2, 2, 2, 1, 4]
    assert [first_host(text) for text in ("a", "gnode[10,20,25]", "cn-[0009-0011],b", "")] == ["a", "gnode10", "cn-0009", ""]


def test_what_was_found_is_plain_data() -> None:
    assert launched(HYDRA) == Launched("MPICH's mpiexec", 2, 3, 1, 2, -1, 0, "", "")
