"""Reductions against NumPy, and collectives between threads: every kind, any size, ranks that differ, fail and leave."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastps.kernels.collectives import exchange
from fastps.kernels.collectives.exchange import ELEMENTS, KINDS, NO_REDUCTION, REDUCTIONS, Exchange, can_reduce, described
from fastps.kernels.update import fold
from tests.support import processes

BLOCK, DEPTH = 4096, 3
SLICE_NS = 5_000_000
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
FLOATS = ("float32", "float64")
ISAS = {"baseline": 0, "avx2": 1, "avx512": 2}
UFUNCS = {
    "sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip


def _combined(arrays: list[Any], reduction: str) -> Any:
    """NumPy's result, in the order of the arrays and in their type."""
    if reduction == "average":
        return _combined(arrays, "sum") / arrays[0].dtype.type(len(arrays))
    result = arrays[0].copy()
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            result = UFUNCS[reduction](result, array)
    return result


def _arrays(dtype: str, count: int, length: int, seed: int = 0) -> list[Any]:
    random = np.random.default_rng(seed)
    if dtype in FLOATS:
        arrays = [random.standard_normal(length).astype(dtype) for _ in range(count)]
        for array in arrays:
            array[random.integers(0, length, length // 50)] = random.choice([np.nan, np.inf, -np.inf, 0.0, -0.0])
        return arrays
    limits = np.iinfo(dtype)
    return [random.integers(limits.min, limits.max, length, dtype, endpoint=True) for _ in range(count)]


def _reduced(element: str, reduction: str, arrays: list[Any], isa: int | None = None) -> Any:
    out, second = np.empty_like(arrays[0]), np.empty_like(arrays[0])
    addresses = [array.ctypes.data for array in arrays]
    exchange.reduce_arrays(
        ELEMENTS[element], REDUCTIONS[reduction], addresses, len(out), out.ctypes.data, second.ctypes.data, isa
    )
    np.testing.assert_array_equal(out, second)
    return out


@pytest.mark.parametrize("isa", fold.instruction_sets())
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_reduction_has_numpys_bits(dtype: str, isa: str) -> None:
    for reduction in REDUCTIONS:
        if not can_reduce(ELEMENTS[dtype], REDUCTIONS[reduction]):
            assert (reduction == "average") == (dtype in INTEGERS) or reduction in ("and", "or", "xor")
            continue
        for count, length in ((1, 7), (2, 1), (2, 2500), (3, 1024), (5, 3001)):
            arrays = _arrays(dtype, count, length)
            found = _reduced(dtype, reduction, arrays, ISAS[isa])
            np.testing.assert_array_equal(found, _combined(arrays, reduction), f"{reduction} of {count}")


@pytest.mark.parametrize("isa", fold.instruction_sets())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_summed_as_floats_and_rounded_once(dtype: str, isa: str) -> None:
    torch.manual_seed(0)
    for reduction in ("sum", "average", "product", "min", "max"):
        for count in (1, 2, 5):
            halves = [(torch.randn(3001) * 100).to(getattr(torch, dtype)) for _ in range(count)]
            halves[0][:4] = torch.tensor([float("nan"), float("inf"), 1e-7, 60000.0])
            found = torch.from_numpy(_reduced(dtype, reduction, [half.view(torch.int16).numpy() for half in halves], ISAS[isa]))
            wanted = torch.from_numpy(_combined([half.float().numpy() for half in halves], reduction)).to(halves[0].dtype)
            torch.testing.assert_close(found.view(wanted.dtype), wanted, rtol=0, atol=0, equal_nan=True)


def test_an_output_may_be_one_of_the_arrays_and_lie_anywhere() -> None:
    for place in range(3):
        memory = np.arange(9001, dtype=np.float32)
        arrays = [memory[1:3000], memory[3001:6000], memory[6002:9001]]
        wanted = _combined([each.copy() for each in arrays], "sum")
        addresses = [each.ctypes.data for each in arrays]
        exchange.reduce_arrays(ELEMENTS["float32"], REDUCTIONS["sum"], addresses, 2999, addresses[place])
        np.testing.assert_array_equal(arrays[place], wanted)


def test_a_reduction_that_a_type_has_not_is_refused() -> None:
    assert not can_reduce(ELEMENTS["int32"], REDUCTIONS["average"]) and not can_reduce(ELEMENTS["float32"], REDUCTIONS["xor"])
    with pytest.raises(ValueError, match="expected 1 to 64 arrays of a type with this reduction"):
        exchange.reduce_arrays(ELEMENTS["int32"], REDUCTIONS["average"], [0], 1, 0)


class World:
    """The ranks of a group as threads over one memory."""

    def __init__(self, size: int, block: int = BLOCK, depth: int = DEPTH, yields: int = 3) -> None:
        self.size = size
        self.memory = np.zeros(exchange.memory_bytes(size, depth, block), np.uint8)
        self.ranks = [Exchange(self.memory, rank, size, block, depth, 0, yields) for rank in range(size)]

    def run(self, member: Callable[[int, Exchange], None]) -> None:
        """Call `member(rank, exchange)` in a thread for each rank; raise what one raised."""
        with ThreadPoolExecutor(self.size) as threads:
            list(threads.map(member, range(self.size), self.ranks))


def _run(
    mine: Exchange, kind: str, dtype: str, reduction: str | None, root: int, size: int, inputs: list[Any], outputs: list[Any]
) -> None:
    number = NO_REDUCTION if reduction is None else REDUCTIONS[reduction]
    addresses = [[each.ctypes.data for each in side] for side in (inputs, outputs)]
    mine.start(KINDS[kind], ELEMENTS[dtype], number, root, size, *addresses)
    for _ in range(4000):
        if mine.advance(SLICE_NS) == exchange.DONE:
            return
    raise AssertionError(f"{kind} did not end")


def _play(mine: Exchange, rank: int, size: int, kind: str, length: int, seed: int, root: int) -> None:
    """One collective of float32, compared with what NumPy says."""
    random = np.random.default_rng(seed)
    every = [random.standard_normal((size, length)).astype(np.float32) for _ in range(size)]  # of each rank, for each rank
    own, firsts, mines = every[rank].copy(), [each[0] for each in every], [each[rank] for each in every]
    one, all_own, outs = [own[0]], list(own), [np.full(length, -1, np.float32) for _ in range(size)]
    cases: dict[str, tuple[str | None, list[Any], list[Any], list[Any]]] = {  # reduction, inputs, outputs, expected outputs
        "barrier": (None, [], [], []),
        "broadcast": (None, one, one, [firsts[root]]),
        "all_reduce": ("sum", one, one, [_combined(firsts, "sum")]),
        "reduce": ("max", one, one, [_combined(firsts, "max") if rank == root else firsts[rank]]),
        "reduce_scatter": ("sum", all_own, outs[:1], [_combined(mines, "sum")]),
        "all_gather": (None, one, outs, firsts),
        "gather": (None, one, outs, firsts if rank == root else outs),
        "scatter": (None, all_own, outs[:1], [every[root][rank]]),
        "all_to_all": (None, all_own, outs, mines),
    }
    reduction, inputs, outputs, expected = cases[kind]
    _run(mine, kind, "float32", reduction, root, 4 * length if inputs else 0, inputs, outputs)
    np.testing.assert_array_equal(outputs, expected)


def _play_all(world: "World", played: list[tuple[str, int, int]]) -> None:
    """Collectives one after the other, each of a kind, a length and a root."""

    def member(rank: int, mine: Exchange) -> None:
        for seed, (kind, length, root) in enumerate(played):
            _play(mine, rank, world.size, kind, length, seed, root % world.size)

    world.run(member)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.sampled_from([(1024, 1), (4096, 2), (4096, 3)]),
    st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, 5000), st.integers(0, 4)), min_size=1, max_size=8),
)
def test_collectives_in_any_order_give_numpys_results(
    size: int, memory: tuple[int, int], played: list[tuple[str, int, int]]
) -> None:
    _play_all(World(size, *memory), played)


def test_a_rank_that_waits_on_a_busy_core_looks_for_deadlines_before_it_has_yielded_its_last_time() -> None:
    mine = World(2, 4096, 2, yields=200).ranks[0]
    mine.start(KINDS["barrier"], ELEMENTS["float32"], NO_REDUCTION, 0, 0, [], [])
    with processes.busy_core():
        began = time.monotonic()
        assert mine.advance(SLICE_NS) == exchange.WAITING
        assert time.monotonic() - began < 0.5, "20 ms; 200 yields take 1.1 s"


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_thousand_random_collectives(size: int) -> None:
    random = np.random.default_rng(size)
    played = [
        (str(random.choice(sorted(KINDS))), int(10 ** random.uniform(0, 4.5)), int(random.integers(size))) for _ in range(1000)
    ]

    _play_all(World(size), played)


def _start(mine: Exchange, kind: str, length: int = 4) -> Any:
    array = np.ones(length, np.float32)
    reduction = REDUCTIONS["sum"] if kind == "all_reduce" else NO_REDUCTION
    mine.start(KINDS[kind], ELEMENTS["float32"], reduction, 0, 4 * length, [array.ctypes.data], [array.ctypes.data])
    return array


def test_a_rank_waits_for_one_that_is_absent_and_names_it() -> None:
    first, _ = World(2).ranks
    array = _start(first, "all_reduce")
    assert first.advance(1000) == exchange.WAITING
    assert first.other == 1 and array[0] == 1
    assert described(*first.own_words()) == "all_reduce (sum) of 4 float32"


@pytest.mark.parametrize(("kind", "length"), [("broadcast", 4), ("all_reduce", 5), ("all_reduce", 50_000)])
def test_ranks_in_different_collectives_notice(kind: str, length: int) -> None:
    first, second = World(2).ranks
    kept = [_start(first, "all_reduce", 4), _start(second, kind, length)]
    assert first.advance(1000) == exchange.WAITING
    assert second.advance(1000) == exchange.DIFFERS and second.other == 0
    assert described(*second.words_of(0)) == "all_reduce (sum) of 4 float32"
    assert first.advance(1000) == exchange.DIFFERS and described(*first.words_of(1)) != described(*first.own_words())
    assert len(kept) == 2


def test_a_failed_rank_ends_the_wait_of_the_others_and_says_why() -> None:
    first, second = World(2).ranks
    kept = _start(first, "all_reduce")
    second.fail("rank 1: out of cheese")
    second.leave()  # the first call counts
    assert first.advance(10**10) == exchange.WAITING
    state, process_id, message, has_begun = first.state_of(1)
    assert (state, message, has_begun) == (exchange.FAILED, "rank 1: out of cheese", False) and process_id > 0
    assert len(kept) == 4


def test_a_rank_that_left_after_its_part_is_not_missed() -> None:
    first, second = World(2, block=4096, depth=2).ranks
    kept = [_start(first, "broadcast", 2048), _start(second, "broadcast", 2048)]  # two blocks
    assert first.advance(1000) == exchange.WAITING and first.other == 1  # for its word that it makes the same
    assert second.advance(1000, True) == exchange.DONE
    assert first.advance(1000) == exchange.DONE
    first.leave()
    assert second.advance(1000) == exchange.DONE and second.state_of(0)[0] == exchange.LEFT
    assert len(kept) == 2


def test_wrong_arguments_are_refused() -> None:
    memory = np.zeros(exchange.memory_bytes(2, 2, 4096), np.uint8)
    for rank, size, block, depth in ((2, 2, 4096, 2), (0, 65, 8192, 2), (0, 2, 100, 2), (0, 2, 4096, 9), (0, 2, 8192, 2)):
        with pytest.raises(ValueError, match="expected"):
            Exchange(memory, rank, size, block, depth)
    mine = Exchange(memory, 0, 2, 4096, 2)
    for kind, element, reduction, root, nbytes, inputs in (
        ("all_reduce", 0, NO_REDUCTION - 1, 0, 4, [0]),
        ("all_reduce", 0, REDUCTIONS["sum"], 0, 5, [0]),
        ("broadcast", 0, NO_REDUCTION, 2, 4, [0]),
        ("scatter", 0, NO_REDUCTION, 0, 4, [0, 0, 0]),
        ("broadcast", 0, NO_REDUCTION, 0, -1, [0]),
    ):
        with pytest.raises(ValueError, match="expected"):
            mine.start(KINDS[kind], element, reduction, root, nbytes, inputs, [0])
    kept = _start(mine, "all_reduce")
    with pytest.raises(ValueError, match="expected that the last collective is done"):
        _start(mine, "all_reduce")
    with pytest.raises(ValueError, match="expected a rank below 2"):
        mine.state_of(2)
    assert len(kept) == 4
