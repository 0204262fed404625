"""Which worker a process is: what the script says counts, then the variables of fastps, then those of torchrun."""

import pytest

from fastps.errors import UsageError
from fastps.job.environment import identity, job_name, joins, rank, sync_of, world_size
from tests.job.conftest import Environment

TORCHRUN = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.usefixtures("environment")
def test_without_a_launcher_a_process_is_alone_in_a_job_of_its_own() -> None:
    assert (rank(), world_size(), joins()) == (0, 1, False)
    assert identity().job != identity().job


def test_the_variables_of_fastps_come_before_those_of_torchrun(environment: Environment) -> None:
    environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "2"})
    assert (rank(), world_size()) == (3, 4)
    environment({"FASTPS_RANK": "1", "FASTPS_WORKERS": "2", "FASTPS_JOB": "mnist"})
    assert (rank(), world_size(), identity().name, job_name(2)) == (1, 2, "mnist", "mnist.2")


def test_what_the_script_says_comes_first(environment: Environment) -> None:
    environment({"FASTPS_RANK": "1", "FASTPS_WORKERS": "2", "FASTPS_JOB": "mnist"})
    found = identity("other", 4, 5)
    assert (found.name, found.rank, found.workers) == ("other", 4, 5)


def test_workers_of_one_torchrun_find_one_name_and_a_restart_finds_another(environment: Environment) -> None:
    environment({"RANK": "0", "WORLD_SIZE": "2"}, TORCHRUN)
    first = identity().name
    environment({"RANK": "1"})
    assert identity().name == first
    environment({"TORCHELASTIC_RESTART_COUNT": "1"})
    assert identity().name != first


@pytest.mark.parametrize(("variables", "sentence"), [
    ({"RANK": "two"}, "variable RANK to be a whole number, found 'two'"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "found rank 2 of 2 workers"),
    ({"WORLD_SIZE": "2"}, "not which one this is"),
    ({"RANK": "9" * 5000}, "variable RANK to be a whole number, found '9999"),
    ({"RANK": "0", "WORLD_SIZE": "1" + "0" * 20}, "variable WORLD_SIZE to be a whole number, found '1000"),
    ({"FASTPS_JOB": "a\nb"}, "of printable text, found 'a\\\\nb'"),
    ({"FASTPS_JOB": "x" * 200}, "1 to 64 bytes of printable text, found 'xxx"),
    ({"FASTPS_JOB": ""}, "1 to 64 bytes of printable text, found ''"),
    ({"FASTPS_JOB": "\udcff"}, "printable text"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "neither FASTPS_JOB nor torchrun's variables"),
])  # fmt: skip
def test_variables_that_make_no_worker_are_refused(variables: dict[str, str], sentence: str, environment: Environment) -> None:
    environment(variables)
    with pytest.raises(UsageError, match=sentence):
        identity()


@pytest.mark.parametrize(("own", "wanted", "found"), [("asp", "bsp", "asp"), ("asp", "asp", "asp"), (None, "ssp:3", "ssp:3")])
def test_a_script_that_names_another_discipline_than_the_launcher_says_so_once(
    own: str | None, wanted: str, found: str, environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    for rank_ in range(2):
        environment({"FASTPS_RANK": str(rank_), "FASTPS_WORKERS": "2", "FASTPS_SYNC": wanted})
        assert sync_of(own) == found
    said = [f"the script's own sync={own} counts, and --sync {wanted} (FASTPS_SYNC) has no effect"]
    assert [record.message for record in caplog.records] == said * (own is not None and own != wanted)
