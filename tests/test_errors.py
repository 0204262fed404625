"""Errors: each survives pickle and copy, and each outcome of the compiled core has the error that says what to do."""

import copy
import pickle

import pytest

from fastps import errors
from fastps.kernels.protocol import lane

CLASSES = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.Error)]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickle_and_copy_with_its_attributes(kind: type[errors.Error]) -> None:
    named = kind in (errors.WorkerDiedError, errors.ExpelledError, errors.NonFiniteGradientError)
    error = kind("it rained", 3) if named else kind("it rained")
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is kind and str(same) == str(error) and vars(same) == vars(error)


@pytest.mark.parametrize("outcome", [lane.DONE, lane.BUSY])
def test_an_outcome_that_is_no_failure_raises_nothing(outcome: int) -> None:
    assert errors.raise_for_outcome(outcome, 0, 3) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(("outcome", "kind", "sentence"), [
    (lane.FENCED, errors.UsageError, "this worker was fenced: the others took it for dead"),
    (lane.BAD_DESCRIPTOR, errors.ProtocolError, "worker 7 posted a push"),
    (lane.NO_BUFFER, errors.ProtocolError, "all 5 weights buffers are pinned"),
    (lane.BAD_STATE, errors.ProtocolError, "the committed state of a shard"),
    (-99, errors.ProtocolError, "outcome -99; this is an error of fastps"),
])  # fmt: skip
def test_a_failure_is_named(outcome: int, kind: type[errors.Error], sentence: str) -> None:
    with pytest.raises(kind, match=sentence):
        errors.raise_for_outcome(outcome, 7, 5)
