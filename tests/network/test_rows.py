"""Rows: what nodes say of a version is read as it was written, and what no node says is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fastps.errors import ProtocolError
from fastps.job.fault_policy import FaultPolicy
from fastps.job.layout import Layout, place
from fastps.job.specs import parse_policy
from fastps.job.update_rules import SGD, Hyper
from fastps.network.rows import Row, RowKind, Table, common_terms, differing, no_terms
from fastps.network.sums import Terms

PARAMETERS = place([(name, (3,), (1,), 0) for name in "abc"])
MODEL = Layout(PARAMETERS, 1, SGD(0.1).rule, parse_policy("bsp"), 3, faults=FaultPolicy())


def _row(**fields: object) -> Row:
    terms = Terms([Hyper(0.5)], np.array([True, False, True]))
    return replace(Row(RowKind.STEP, terms, 7, 2, 16, nonce=5, group=3, digest=(6, 99), workers=2), **fields)  # type: ignore[arg-type]


def test_a_table_has_the_rows_of_the_nodes_that_take_part() -> None:
    table = Table(MODEL)
    first, last = _row(stale=1 << 57 | 3, begun=4, wrote=True, tells=True), _row(kind=RowKind.LEFT, version=-1, weight=0)
    found = table.read(table.written(0, first) + table.written(2, last))
    assert sorted(found) == [0, 2]
    for row, expected in ((found[0], first), (found[2], last)):
        assert replace(row, terms=expected.terms) == expected
        assert row.terms.hypers == expected.terms.hypers
        assert row.terms.present.tolist() == [True, False, True]


@pytest.mark.parametrize("word", [9, 1 | 4 << 8, 3 | 57 << 16])
def test_a_row_of_an_unknown_form_is_refused(word: int) -> None:
    """A kind, a flag, and a number of sums that no node has."""
    table = Table(MODEL)
    whole = table.written(1, _row())
    whole.numpy().view(np.uint32)[table.floats] = word
    with pytest.raises(ProtocolError, match="expected a row"):
        table.read(whole)


@pytest.mark.parametrize(
    "fields", [{"weight": 1 << 21}, {"version": -2}, {"samples": -1}, {"size": 1 << 41}, {"dropped": -1}, {"stale": 1 << 60}]
)
def test_a_row_with_numbers_out_of_range_is_refused(fields: dict[str, int]) -> None:
    table = Table(MODEL)
    with pytest.raises(ProtocolError, match="expected a row"):
        table.read(table.written(1, _row(**fields)))


def test_a_node_that_pushes_no_row_of_its_own_is_refused_before_others_read_it() -> None:
    table = Table(MODEL)
    whole = table.written(1, _row()).numpy().view(np.uint8)
    table.check(1, whole)
    with pytest.raises(ProtocolError, match="expected a row of node 2, found none"):
        table.check(2, whole)
    whole[4 * table.floats] = 99
    with pytest.raises(ProtocolError, match="expected a row of a known kind"):
        table.check(1, whole)


def test_random_rows_are_refused_or_read() -> None:
    table, generator = Table(MODEL), np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        words = torch.from_numpy(generator.integers(0, 1 << 32, table.layout.buffer_floats, np.uint32).view(np.float32))
        try:
            table.read(words)
        except ProtocolError:
            refused += 1
    assert refused > 150


def test_terms_are_the_mean_of_the_rates_and_all_parameters_that_any_node_has() -> None:
    one = _row(weight=1, terms=Terms([Hyper(0.1, 0.9)], np.array([True, False, False])))
    three = _row(weight=3, terms=Terms([Hyper(0.5, 0.9)], np.array([False, False, True])))
    found = common_terms([one, three])
    assert found.hypers == [Hyper(0.4, 0.9)]
    assert found.present.tolist() == [True, False, True]
    assert common_terms([one, one]).hypers == [Hyper(0.1, 0.9)], "the bits of equal rates stay"
    assert not no_terms(MODEL, [Hyper(0.1)]).present.any()


def test_the_first_node_with_other_weights_at_one_version_is_named() -> None:
    rows = {0: _row(), 1: _row(), 2: _row(digest=(6, 98)), 3: _row(digest=(5, 1)), 4: _row(digest=(-1, 0))}
    assert [text.partition(" than")[0] for text in differing(rows)] == ["node 2 has other weights at version 6"]
