"""The loops over a model's tensors: both kinds do what the attributes do, for plain tensors and for subclasses."""

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import increment_version

from fastps.kernels.tensors import torch_tensors
from fastps.torch import tensor_loops
from fastps.torch.tensor_loops import TensorLoops
from tests.support.commands import fastps

Kind = Callable[[list[Any]], TensorLoops]


@pytest.fixture(params=[TensorLoops, torch_tensors.CompiledLoops], ids=["plain", "compiled"], scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    """Both kinds of loops."""
    found: Kind = request.param
    return found


class Renamed(torch.Tensor):
    """A subclass: the interpreter's own access decides what its attributes are."""


def _parameters() -> list[Any]:
    return [torch.nn.Parameter(torch.full((2, 3), float(index))) for index in range(3)]


def _values() -> list[torch.Tensor]:
    return [torch.full((2, 3), 10.0 + index) for index in range(3)]


def test_this_installation_has_the_compiled_loops() -> None:
    assert tensor_loops.why_not_compiled() is None
    assert isinstance(tensor_loops.tensor_loops(_parameters()), torch_tensors.CompiledLoops)


def test_tensors_show_other_values_without_a_copy_or_a_write(kind: Kind) -> None:
    parameters, values = _parameters(), _values()
    loops = kind(parameters)
    loops.show(loops.prepare(values))
    assert [each.data_ptr() for each in parameters] == [each.data_ptr() for each in values]
    assert loops.changed() == -1, "pointing elsewhere is no write"
    assert all(each.is_leaf and each.requires_grad for each in parameters)
    values[1].fill_(77.0)
    assert parameters[1].tolist() == [[77.0] * 3] * 2


def test_a_backward_between_two_shows_sees_one_of_them(kind: Kind) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loops = kind([parameter])
    loops.show(loops.prepare([torch.full((3,), 2.0)]))
    loss = (parameter * parameter).sum()  # saves the weights
    loss.backward()
    assert parameter.grad is not None and parameter.grad.tolist() == [4.0] * 3
    loops.show(loops.prepare([torch.full((3,), 5.0)]))
    (parameter * parameter).sum().backward()
    assert parameter.grad.tolist() == [14.0] * 3


def test_memory_that_nothing_shows_any_more_is_let_go(kind: Kind) -> None:
    parameters, values = _parameters(), _values()
    loops = kind(parameters)
    loops.show(loops.prepare(values))
    loops.set_gradients(loops.prepare(values))
    seen = weakref.ref(values[0])
    loops.show(loops.prepare(_values()))
    loops.set_gradients(loops.prepare(_values()))
    loops.drop_gradients()
    del values
    gc.collect()
    assert seen() is None


def test_what_shares_a_tensors_storage_follows_it_from_the_first_show_to_the_copies_in_the_end() -> None:
    parameters = _parameters()
    earlier = [each.detach() for each in parameters]
    array, before = earlier[1].numpy(), earlier[1].tolist()
    loops = torch_tensors.CompiledLoops(parameters)
    memory = torch.arange(36.0)
    values = [list(memory[offset : offset + 18].view(3, 2, 3)) for offset in (0, 18)]
    values = [[torch.from_numpy(each.numpy()) for each in row] for row in values]  # each with a storage of its own
    first, second = (loops.prepare(row, memory) for row in values)
    loops.show(first)
    alias = parameters[1].detach()
    loops.show(second)
    assert alias.data_ptr() == parameters[1].data_ptr() == values[1][1].data_ptr()
    loops.show(other := loops.prepare(_values(), "another memory"))
    assert alias.data_ptr() == earlier[1].data_ptr() == parameters[1].data_ptr() != values[1][1].data_ptr()
    assert array.tolist() == before, "an array has the memory that it was made of"
    expected = [each.tolist() for each in parameters]
    loops.show_copies()
    del other, values, first, second, memory
    gc.collect()
    assert [each.tolist() for each in parameters] == [each.tolist() for each in earlier] == expected
    assert alias.data_ptr() == parameters[1].data_ptr()


def test_a_storage_that_others_have_touched_is_left_to_them() -> None:
    parameters, values = _parameters(), [_values(), _values()]
    loops = torch_tensors.CompiledLoops(parameters)
    first, second = (loops.prepare(row, "memory") for row in values)
    loops.show(first)
    moved = parameters[1].detach()
    moved.untyped_storage().share_memory_()  # copied to elsewhere, under the same storage
    loops.show(second)
    assert [each.data_ptr() for each in parameters] == [each.data_ptr() for each in values[1]]
    assert moved.tolist() == values[0][1].tolist()
    loops.show(first)
    assert [each.data_ptr() for each in parameters] == [each.data_ptr() for each in values[0]]


@pytest.mark.parametrize("make", [
    lambda: torch.zeros(4),
    lambda: torch.zeros(3, 2).t(),
    lambda: torch.zeros(7)[1:].view(2, 3),
], ids=["another shape", "other strides", "an offset"])  # fmt: skip
def test_values_of_another_form_are_shown_as_they_are(kind: Kind, make: Callable[[], torch.Tensor]) -> None:
    parameter, values = torch.nn.Parameter(torch.ones(2, 3)), make()
    loops = kind([parameter])
    loops.show(loops.prepare([values]))
    assert parameter.shape == values.shape and parameter.stride() == values.stride()
    assert parameter.data_ptr() == values.data_ptr()


DISTURBANCES: dict[str, Callable[[Any], None]] = {
    "other memory": lambda parameter: setattr(parameter, "data", torch.zeros(2, 3)),
    "another shape": lambda parameter: setattr(parameter, "data", torch.zeros(5)),
    "other strides of the same memory": lambda parameter: setattr(parameter, "data", parameter.data.as_strided((2,), (3,))),
    "its own memory again": lambda parameter: setattr(parameter, "data", parameter.data),
    "transposed in place": lambda parameter: parameter.data.t_() if parameter.dim() == 2 else None,
}


@pytest.mark.sampled(2)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("show"), st.integers(0, 3)),
            st.tuples(st.sampled_from(sorted(DISTURBANCES)), st.integers(0, 2)),
            st.tuples(st.just("fail"), st.integers(0, 2)),
        ),
        max_size=12,
    )
)
def test_whatever_happened_in_between_the_next_values_are_shown(kind: Kind, happened: list[tuple[str, int]]) -> None:
    parameters = _parameters()
    loops = kind(parameters)
    sets = [[torch.full((2, 3), 10.0 * row + index) for index in range(3)] for row in range(3)]
    sets.append([torch.full((3, 2), 40.0).t(), torch.zeros(4), torch.full((2, 3), 42.0)])  # two of other forms
    expected = [[(each.data_ptr(), each.shape, each.stride(), each.tolist()) for each in values] for values in sets]
    memories = ["one", "one", "another", None]
    prepared = [loops.prepare(values, memory) for values, memory in zip(sets, memories, strict=True)]
    for what, index in [*happened, ("show", 0), ("show", 1)]:
        if what == "show":
            loops.show(prepared[index])
            assert [(each.data_ptr(), each.shape, each.stride(), each.tolist()) for each in parameters] == expected[index]
        elif what == "fail":
            refused = [1 if index == place else each for place, each in enumerate(sets[0])]
            with pytest.raises(TypeError, match="data"):
                loops.show(loops.prepare(refused, memories[index]))  # type: ignore[arg-type]
        else:
            DISTURBANCES[what](parameters[index])
    assert [[(each.data_ptr(), each.shape, each.stride(), each.tolist()) for each in values] for values in sets] == expected


@pytest.mark.parametrize("is_subclass", [False, True])
def test_a_counted_write_is_told_to_autograd_alone(kind: Kind, is_subclass: bool) -> None:
    parameters = _parameters()
    if is_subclass:
        parameters[0] = torch.zeros(2, 3).as_subclass(Renamed).requires_grad_()
    loops = kind(parameters)
    losses = [each.square().sum() for each in parameters]
    loops.count_writes(parameters[:1])
    assert loops.changed() == -1
    losses[1].backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses[0].backward()
    shown = loops.prepare(_values())
    loops.show(shown, True)
    assert [each._version for each in parameters] == [2, 1, 1]
    with torch.no_grad():
        parameters[1].add_(1.0)
    loops.show(shown, True)
    assert loops.changed() == 1, "a write stays one"
    loops = kind(parts := [torch.nn.Parameter(each) for each in torch.zeros(2, 3).unbind()])
    loops.count_writes(parts[:1])
    loops.show(loops.prepare([torch.ones(3), torch.ones(3)]), True)
    assert loops.changed() == -1, "views of one tensor have one counter"
    first, second = (kind([torch.nn.Parameter(each)]) for each in torch.zeros(2, 3).unbind())
    first.show(first.prepare([torch.ones(3)]), True)
    assert second.changed() == -1, "also in two optimizers"


def test_a_thread_does_not_take_anothers_counting_for_a_write(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.zeros(3).as_subclass(Renamed).requires_grad_()  # counted in Python, where threads take turns
    loops, found = kind([parameter]), []
    looking = threading.Thread(target=lambda: found.append(loops.changed()))

    def count(written: Any) -> None:
        increment_version(written)
        looking.start()
        looking.join(0.2)

    monkeypatch.setattr(tensor_loops if kind is TensorLoops else torch_tensors, "increment_version", count)
    loops.count_writes([parameter])
    looking.join()
    assert found == [-1]


@pytest.mark.slow
def test_loops_that_several_threads_use_first_at_once_do_not_hang() -> None:
    text = """if True:
        import threading, torch
        from fastps.torch.tensor_loops import tensor_loops

        def use(barrier: threading.Barrier) -> None:
            parameter = torch.nn.Parameter(torch.zeros(2))
            loops, gradients = tensor_loops([parameter]), [torch.ones(2)]
            values = loops.prepare(gradients)
            barrier.wait()
            loops.own(values, 0)

        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=use, args=(barrier,), daemon=True) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join(60) for thread in threads]
        assert not any(thread.is_alive() for thread in threads)
    """
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_the_first_tensor_that_was_written_to_is_found(kind: Kind) -> None:
    parameters = _parameters()
    loops = kind(parameters)
    with torch.no_grad():
        for _ in range(1000):
            parameters[2].add_(1.0)
    assert loops.changed() == 2
    loops.remember()
    assert loops.changed() == -1


def test_the_first_gradient_that_is_another_is_found(kind: Kind) -> None:
    parameters, gradients = _parameters(), _values()
    loops = kind(parameters)
    assert loops.other_gradient(loops.prepare(gradients)) == 0
    loops.set_gradients(loops.prepare(gradients))
    assert loops.other_gradient(loops.prepare(gradients)) == -1
    assert all(each.grad is gradient for each, gradient in zip(parameters, gradients, strict=True))
    parameters[1].grad = gradients[1].clone()  # equal, and not the same
    assert loops.other_gradient(loops.prepare(gradients)) == 1
    loops.drop_gradients()
    assert [each.grad for each in parameters] == [None] * 3
    loops.drop_gradients()


def test_what_the_attributes_refuse_is_refused(kind: Kind) -> None:
    parameters = _parameters()
    loops = kind(parameters)
    with pytest.raises(TypeError, match="data"):
        loops.show(loops.prepare([1, 2, 3]))  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="size"):
        loops.set_gradients(loops.prepare([torch.zeros(5)] * 3))
    with pytest.raises(RuntimeError, match="own grad"):
        loops.set_gradients(loops.prepare(parameters))
    with pytest.raises(ValueError, match=r"expected 3 .*, found 1"):
        loops.show(loops.prepare([torch.zeros(2, 3)]))
    with pytest.raises(ValueError, match=r"expected 3 .*, found 0"):
        loops.other_gradient(loops.prepare([]))


def test_subclasses_are_asked_by_their_attributes(kind: Kind) -> None:
    tensor = torch.zeros(2, 3).as_subclass(Renamed)
    loops, values = kind([tensor]), torch.ones(2, 3)
    loops.show(loops.prepare([values]))
    assert tensor.tolist() == values.tolist()
    loops.set_gradients(loops.prepare([values]))
    assert loops.other_gradient(loops.prepare([values])) == -1
    loops.drop_gradients()
    assert tensor.grad is None
    tensor.add_(1.0)
    assert loops.changed() == 0


def test_what_is_no_tensor_is_refused(kind: Kind) -> None:
    with pytest.raises(AttributeError):
        kind([object()])


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPS_TENSOR_LOOPS", "attributes")
    assert isinstance(tensor_loops.tensor_loops(_parameters()), TensorLoops)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("change", "why"), [
    ("sys.modules['fastps.kernels.tensors.torch_tensors'] = None", "are not there"),
    ("import fastps.kernels.tensors.torch_tensors as t; t.BUILT_FOR = '1.0.0'", "compiled loops are for torch 1.0.0"),
])  # fmt: skip
def test_another_torch_than_it_was_built_for_gets_the_plain_loops_and_a_reason(change: str, why: str, tmp_path: Path) -> None:
    program = f"""
import logging, sys, torch
{change}
logging.basicConfig(level=logging.INFO)
from fastps.torch import tensor_loops
from fastps.errors import UsageError
for _ in range(2):
    assert isinstance(tensor_loops.tensor_loops([torch.zeros(1)]), tensor_loops.TensorLoops)
print(tensor_loops.why_not_compiled())
"""
    ended = fastps(code=program, XDG_CACHE_HOME=str(tmp_path))  # without builds
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("INFO:fastps.torch:") == 1 and why in ended.stderr
    assert why in ended.stdout and "FASTPS_TENSOR_LOOPS=build fastps doctor" in ended.stdout


@pytest.mark.parametrize("other", [
    lambda value: value.double(), lambda value: value[:1], lambda value: value.t(), lambda value: value.as_subclass(Renamed),
    lambda value: torch.complex(value, value).conj().imag, lambda value: torch.empty(2, 2, device="meta"),
    lambda value: value.to_sparse(),
], ids=["type", "shape", "strides", "subclass", "negative", "meta", "sparse"])  # fmt: skip
def test_a_copier_copies_the_bytes_of_tensors_of_their_values_form_and_says_where_it_cannot(
    other: Callable[[Any], Any],
) -> None:
    values = [torch.zeros(2, 2), torch.zeros((), dtype=torch.int64)]
    take = tensor_loops.copier_into(values)
    assert take is not None
    whole = torch.arange(8.0).reshape(2, 2, 2)
    assert take([whole[1], torch.tensor(5)]), "also of a part of a tensor"
    assert values[0].tolist() == [[4.0, 5.0], [6.0, 7.0]] and values[1].item() == 5
    assert take([torch.nn.Parameter(torch.ones(2, 2)), torch.tensor(6)]) and values[0].eq(1).all()
    assert not take([other(torch.full((2, 2), 3.0)), torch.tensor(7)])
    with pytest.raises(ValueError, match="expected 2 tensors, found 1"):
        take([whole[0]])
