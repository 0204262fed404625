"""fastps.Publisher: versions of any tensors that other processes read, whole also where the publisher is killed."""

import asyncio
import copy
import os
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastps
from tests.support import processes
from tests.support.said import listen

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]
TYPES += [torch.bool, torch.complex64]


def _job() -> str:
    return f"publisher-{os.getpid()}"


def _model(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(16, 2))
    model.register_buffer("mask", torch.tensor([True, False]), persistent=False)
    return model


def _equal(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = [(dict(each.named_parameters()) | dict(each.named_buffers())) for each in (model, other)]
    return pairs[0].keys() == pairs[1].keys() and all(torch.equal(pairs[0][name], pairs[1][name]) for name in pairs[0])


def _values(count: int, value: int) -> dict[str, torch.Tensor]:
    return {f"w{index}": torch.full((count // 4,), float(value)) for index in range(4)}


def test_parameters_buffers_and_tag_are_one_version() -> None:
    model, other = _model(), _model(1)
    with fastps.Publisher(model, _job()) as publisher, fastps.reader(publisher.job) as reader:
        assert reader.update(other) == publisher.version == 0 and reader.tag == {} and _equal(model, other)
        for step in range(1, 20):
            model(torch.randn(8, 3, 4, 4)).sum().backward()
            with torch.no_grad():
                for each in model.parameters():
                    each -= 0.1
            assert not _equal(model, other)
            assert publisher.publish(tag={"step": step, "name": "é"}) == step
            assert reader.update(other) == step and reader.tag == {"step": step, "name": "é"} and _equal(model, other)
        assert publisher.publish() == 20 and reader.update() == 20 and reader.tag == {}
    assert _equal(model, other), "it keeps copies"


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_copy_is_refused_by_name(copied: Callable[[Any], Any]) -> None:
    with fastps.Publisher(_model(), _job()) as publisher, fastps.reader(publisher.job) as reader:
        for each, text in ((publisher, "a Publisher cannot be copied"), (reader, rf"calls fastps.reader\('{publisher.job}'\)")):
            with pytest.raises(fastps.UsageError, match=text):
                copied(each)


def test_a_model_of_other_strides_is_shown_with_them() -> None:
    model, other = _model().to(memory_format=torch.channels_last), _model(1)
    with fastps.Publisher(model, _job()) as publisher, fastps.reader(publisher.job) as reader:
        reader.update(other)
        assert _equal(model, other)
        assert other.get_parameter("0.weight").stride() == model.get_parameter("0.weight").stride()


@pytest.mark.parametrize("kind", TYPES)
def test_tensors_of_any_type_and_shape_have_their_bits(kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = [(), (0,), (7,), (3, 5)]
    held = {f"t{len(shape)}{sum(shape)}": torch.randint(0, 2, shape, generator=generator).to(kind) for shape in shapes}
    other = torch.nn.Module()
    for name, value in held.items():
        other.register_buffer(name, torch.zeros_like(value))
    with fastps.Publisher(held, _job()) as publisher, fastps.reader(publisher.job) as reader:
        reader.update(other)
        assert all(torch.equal(other.get_buffer(name), value) for name, value in held.items())
        arrays = reader.weights
        assert {name: array.shape for name, array in arrays.items()} == {name: tuple(each.shape) for name, each in held.items()}


@pytest.mark.parametrize("floats", [1_000, 1 << 20, 5 << 20])
def test_values_of_any_size_are_copied_with_any_number_of_threads(floats: int) -> None:
    held, threads = {"w": torch.arange(floats, dtype=torch.float32)}, torch.get_num_threads()
    try:
        with fastps.Publisher(held, _job()) as publisher, fastps.reader(publisher.job) as reader:
            for count in (1, 2, 1):
                torch.set_num_threads(count)
                held["w"] += 1
                publisher.publish(held)
                reader.update()
                assert torch.equal(torch.from_numpy(reader.weights["w"].copy()), held["w"])
    finally:
        torch.set_num_threads(threads)


def test_a_mapping_of_models_is_read_by_prefix_and_published_from_a_state_dict() -> None:
    actor, critic = torch.nn.Linear(3, 2), torch.nn.Linear(3, 1)
    mine = torch.nn.Linear(3, 2)
    with fastps.Publisher({"actor": actor, "critic": critic}, _job()) as publisher, fastps.reader(publisher.job) as reader:
        reader.update(mine, prefix="actor.")
        assert torch.equal(mine.weight, actor.weight)
        with pytest.raises(fastps.LayoutError, match=r"has 'actor.weight': expected a model with that parameter or buffer"):
            reader.update(torch.nn.Linear(3, 2))
        with pytest.raises(fastps.LayoutError, match=r"nothing that begins with 'target\.'"):
            reader.update(mine, prefix="target.")
        values = {"actor": {"weight": torch.ones(2, 3), "bias": torch.ones(2)}}
        flat = {f"actor.{name}": each for name, each in values["actor"].items()}
        publisher.publish(flat | {f"critic.{name}": each for name, each in critic.state_dict().items()})
        reader.update(mine, prefix="actor.")
        assert torch.equal(mine.weight, torch.ones(2, 3)) and not torch.equal(mine.weight, actor.weight)
        with pytest.raises(fastps.LayoutError, match=r"publishes 'critic.weight': expected float32 of shape.*found none"):
            publisher.publish(flat)
        with pytest.raises(fastps.LayoutError, match="publishes no 'other'"):
            publisher.publish({"other": torch.ones(1)})


def test_what_cannot_be_published_is_refused_by_name() -> None:
    model = _model()
    with pytest.raises(fastps.UsageError, match="to publish, or a mapping of tensors, found none"):
        fastps.Publisher(torch.nn.Flatten(), _job())
    with pytest.raises(fastps.UnsupportedError, match="tensor 's': expected dense values of one of bfloat16"):
        fastps.Publisher({"s": torch.eye(2).to_sparse()}, _job())
    with pytest.raises(fastps.UsageError, match="'x': expected a tensor or a model to publish, found int"):
        fastps.Publisher({"x": 1}, _job())
    with pytest.raises(fastps.UsageError, match="first_version: expected 0 to"):
        fastps.Publisher(model, _job(), first_version=-1)
    with fastps.Publisher(model, _job()) as publisher:
        with pytest.raises(fastps.AttachError, match="a job of this name is running"):
            fastps.Publisher(model, _job())
        with pytest.raises(fastps.UsageError, match="tag: expected a dict of JSON's types"):
            publisher.publish(tag={"x": object()})
        with pytest.raises(fastps.UsageError, match="a key is 1, and no text"):
            publisher.publish(tag={1: 2})  # type: ignore[dict-item]
        with pytest.raises(fastps.UsageError, match="tag: expected at most 4096 bytes"):
            publisher.publish(tag={"x": "x" * 5000})
        model.mask = torch.zeros(3, dtype=torch.bool)
        with pytest.raises(fastps.LayoutError, match=r"publishes 'mask': expected bool.*found bool of shape"):
            publisher.publish()
        assert publisher.version == 0
    with pytest.raises(fastps.UsageError, match="has ended; make another Publisher"):
        publisher.publish()


def test_the_state_dict_of_a_wrapped_model_is_published_by_the_models_names() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with fastps.Publisher(model, _job()) as publisher, fastps.reader(publisher.job) as reader:
        for value, prefix in ((1.0, "_orig_mod."), (2.0, "module.")):
            publisher.publish({f"{prefix}{name}": torch.full_like(each, value) for name, each in model.state_dict().items()})
            reader.update(other)
            assert other.weight.eq(value).all() and other.bias.eq(value).all()


def test_what_replaces_a_parameter_is_published() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    with fastps.Publisher(model, _job()) as publisher, fastps.reader(publisher.job) as reader:
        model.weight = torch.nn.Parameter(torch.full((2, 2), 3.0))
        model.bias.data = torch.full((2,), 4.0)
        publisher.publish()
        reader.update(other)
        assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


def _publish_for_ever(job: str, first: int, ready: Callable[[], object]) -> None:
    with fastps.Publisher(_values(4000, first), job, first_version=first) as publisher:
        ready()
        while True:
            publisher.publish(_values(4000, publisher.version + 1), tag={"version": publisher.version + 1})


def _check(reader: fastps.Reader) -> None:
    reader.pull()
    found = {float(each) for array in reader.weights.values() for each in (array.min(), array.max())}
    assert found == {float(reader.version)}
    assert reader.tag in ({}, {"version": reader.version})


@pytest.mark.timing
@pytest.mark.sampled(6)
@pytest.mark.parametrize("seed", range(40))
def test_a_killed_publisher_leaves_a_whole_version_and_its_heir_is_followed(seed: int) -> None:
    job = f"{_job()}-{seed}"
    child = processes.start_ready(lambda ready: _publish_for_ever(job, 0, ready))
    with fastps.reader(job, follow=True) as reader:
        pause = torch.Generator().manual_seed(seed)
        end = time.monotonic() + 0.05 * float(torch.rand((), generator=pause))
        while time.monotonic() < end:
            _check(reader)
        processes.kill(child)
        _check(reader)
        last = reader.version
        heir = processes.start_ready(lambda ready: _publish_for_ever(job, last + 1000, ready))
        began = time.monotonic()
        assert reader.wait(last + 1001, timeout_s=30)
        assert time.monotonic() - began < 1
        _check(reader)
        assert reader.version > last + 1000
        processes.kill(heir)


def test_a_reader_that_does_not_follow_keeps_the_last_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastps.store.reader._LOOK_NS", 0)
    said, other = listen(), torch.nn.Linear(2, 2)
    publisher = fastps.Publisher(torch.nn.Linear(2, 2), _job())
    with fastps.reader(publisher.job) as reader:
        reader.update(other)
        publisher.close()
        assert not reader.wait(1) and reader.over
        with fastps.Publisher(torch.nn.Linear(2, 2), _job(), first_version=7):
            assert reader.update(other) == 0
    assert any("open it with follow=True" in each for each in said)


def test_a_follower_whose_model_does_not_fit_the_next_job_says_so_at_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastps.store.reader._LOOK_NS", 0)
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    publisher = fastps.Publisher(model, _job())
    with fastps.reader(publisher.job, follow=True) as reader:
        reader.update(other)
        publisher.close()
        with fastps.Publisher(torch.nn.Linear(3, 2), _job(), first_version=1):
            for _ in range(2):
                with pytest.raises(fastps.LayoutError, match="expected shape"):
                    reader.update(other)
            assert torch.equal(other.weight, model.weight), "a copy of the last version"
            assert reader.update(torch.nn.Linear(3, 2)) == 1


def test_a_reader_may_come_before_its_publisher() -> None:
    said, made = listen(), []

    def publish() -> None:
        time.sleep(1.5)
        made.append(fastps.Publisher(torch.nn.Linear(2, 2), _job()))

    thread = threading.Thread(target=publish)
    thread.start()
    with fastps.reader(_job()) as reader:
        assert reader.version == 0
    thread.join()
    made[0].close()
    assert any("does not run yet; this reader waits up to 30 s for it" in each for each in said)


def test_an_awaited_version_lets_the_event_loop_run_and_may_be_cancelled() -> None:
    async def main(reader: fastps.Reader, publisher: fastps.Publisher) -> int:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.newer(), 0.1)
        asyncio.get_running_loop().call_later(0.05, publisher.publish)
        assert await reader.newer(timeout_s=30)
        return reader.update()

    with fastps.Publisher(torch.nn.Linear(2, 2), _job()) as publisher, fastps.reader(publisher.job) as reader:
        assert asyncio.run(main(reader, publisher)) == 1


def test_a_model_moves_in_one_thread() -> None:
    model, errors = torch.nn.Linear(2, 2), list[BaseException]()
    with fastps.Publisher(model, _job()) as publisher, fastps.reader(publisher.job) as reader:
        reader.update(other := torch.nn.Linear(2, 2))

        def move() -> None:
            try:
                reader.update(other, copy=True)
                reader.update(other)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=move)
        thread.start()
        thread.join()
    assert [type(error) for error in errors] == [fastps.UsageError] and "give each thread a model of its own" in str(errors[0])


def test_a_forked_childs_model_keeps_the_version_of_the_fork() -> None:
    held: dict[str, Any] = {"w": torch.zeros(1000)}
    other = torch.nn.Module()
    other.register_buffer("w", torch.ones(1000))
    with fastps.Publisher(held, _job()) as publisher, fastps.reader(publisher.job) as reader:
        reader.update(other)

        def work(ready: Callable[[], object]) -> tuple[float, float]:
            ready()
            time.sleep(0.5)
            with fastps.reader(publisher.job) as own:
                mine = torch.nn.Module()
                mine.register_buffer("w", torch.ones(1000))
                own.update(mine)
                return other.get_buffer("w").max().item(), mine.get_buffer("w").max().item()

        child = processes.start_ready(work)
        for value in range(1, 30):
            held["w"] = torch.full((1000,), float(value))
            publisher.publish(held)
            reader.update()
        assert processes.results([child], 30) == [(0.0, 29.0)]


def test_a_publisher_gives_the_buffers_of_readers_that_have_gone_back_and_writes_them_whole_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fastps.store.freed_readers._LOOK_NS", 0)
    with fastps.Publisher(_values(1 << 18, 0), _job(), readers=6) as publisher:
        publisher.publish()
        before = 512 * os.fstat(publisher._store.descriptor).st_blocks
        for _ in range(2):
            readers = [fastps.reader(publisher.job) for _ in range(5)]
            for value in range(20):
                version = publisher.version + 1
                publisher.publish(_values(1 << 18, version), tag={"version": version})
                readers[value % 5].pull()
                _check(readers[value % 5])
            assert 512 * os.fstat(publisher._store.descriptor).st_blocks > before + 4 * (1 << 20)
            for reader in readers:
                reader.close()
            for _ in range(4):
                publisher.publish()
            assert 512 * os.fstat(publisher._store.descriptor).st_blocks == before
