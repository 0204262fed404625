"""The model of a step's schedule: against counts by hand, with shared links, and with work that never comes."""

import pytest

import fastps
from fastps.device.interface import DeviceError
from fastps.lab.worlds.device_schedule import Piece, Speeds, lay_out, model, table

MOMENTUM = fastps.SGD(lr=0.1, momentum=0.9)
PARAMETERS = 1e8
BYTES = 4 * PARAMETERS


def test_one_gpu_reads_and_writes_its_memory_and_nothing_else() -> None:
    found = model(MOMENTUM, 1, PARAMETERS)
    expected_s = 5 * BYTES / Speeds().memory  # weights and momentum are read and written, the gradient is read
    assert found.step_s == pytest.approx(expected_s) and found.bound_s == pytest.approx(expected_s)
    assert set(found.seconds) == {"fold"}


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_traffic_between_gpus_is_that_of_a_reduce_scatter_and_an_all_gather(gpus: int) -> None:
    found = model(MOMENTUM, gpus, PARAMETERS, Speeds(memory=1e15))
    assert found.busiest.startswith("peers")
    assert found.bound_s == pytest.approx(2 * BYTES * (gpus - 1) / gpus / Speeds().peers)


@pytest.mark.parametrize("gpus", [4, 8])
def test_workers_copy_from_different_homes_at_a_time_and_keep_all_links_busy(gpus: int) -> None:
    found = model(MOMENTUM, gpus, PARAMETERS, Speeds(memory=1e15))
    assert found.bound_s / found.step_s > 0.99


def test_twice_the_parameters_take_twice_the_time() -> None:
    once, twice = (model(MOMENTUM, 2, parameters) for parameters in (PARAMETERS, 2 * PARAMETERS))
    assert twice.step_s == pytest.approx(2 * once.step_s)


def test_backward_hides_the_folds_of_all_but_the_last_gradients() -> None:
    backward_s, shards = 0.01, 6  # 400 MB in shards of about 64 MB
    without, overlapped = (model(MOMENTUM, 1, PARAMETERS, backward_s=backward_s, overlaps=each) for each in (False, True))
    fold_s = 5 * BYTES / Speeds().memory
    assert without.step_s == pytest.approx(backward_s + fold_s)
    assert overlapped.step_s == pytest.approx(backward_s + fold_s / shards)


@pytest.mark.parametrize("gpus", [2, 4])
def test_backward_hides_the_folds_and_copies_of_all_but_the_last_bucket(gpus: int) -> None:
    """All homes fold what appears last at a time; of about 6 buckets that is a sixth."""
    backward_s = 0.01
    without, overlapped = (
        model(MOMENTUM, gpus, PARAMETERS, backward_s=backward_s, overlaps=each).step_s - backward_s for each in (False, True)
    )
    assert without / 8 < overlapped < without / 4


def copy(resource: str, size: float) -> Piece:
    return Piece("copy", {resource: size})


def test_what_two_pieces_need_at_a_time_is_shared_and_what_one_needs_is_not() -> None:
    streams = {0: [copy("peers a", 10)], 1: [copy("peers a", 5)], 2: [copy("memory b", 4)]}
    found = [(begin, end, len(pieces)) for begin, end, pieces in lay_out(streams, Speeds(memory=1, peers=1))]
    assert [each[2] for each in found] == [3, 2, 1] and [each[1] for each in found] == pytest.approx([4, 10, 15])


def test_what_a_piece_cannot_use_goes_to_the_other() -> None:
    """A fold beside another GPU's reads of the same memory, which the link holds back to a third of it."""
    streams = {0: [copy("memory a", 6)], 1: [Piece("fold", {"memory a": 1, "peers b": 1})]}
    found = [end for _, end, _ in lay_out(streams, Speeds(memory=3, peers=1))]
    assert found == pytest.approx([1, 1 + (6 - 2) / 3])


def test_work_begins_when_the_event_that_it_waits_for_is_recorded() -> None:
    event = 7
    streams = {
        0: [Piece("wait", event=event, number=2), copy("peers a", 1)],
        1: [Piece("record", event=event, number=1), copy("peers b", 3), Piece("record", event=event, number=2)],
    }
    found = [(begin, end) for begin, end, _ in lay_out(streams, Speeds(peers=1))]
    assert [end for _, end in found] == pytest.approx([3, 4])
    del streams[1][2]
    with pytest.raises(DeviceError, match="waits for what never happens"):
        list(lay_out(streams, Speeds(peers=1)))


def test_a_step_with_the_default_settings_takes_at_most_a_sixth_longer_than_its_busiest_resource() -> None:
    rows = table().splitlines()[2:]
    assert len(rows) == 8
    assert all(85 <= int(row.split("|")[-2].strip().rstrip("%")) <= 100 for row in rows)
