"""What a process that does not wait may read of a table while another folds: whole floats of two versions, until recovery.

A combiner is killed between two rows of a batch. Another process then sees some rows new and some old, and after it has
recovered the lock all rows as they were.
"""

import pytest

hooks = pytest.importorskip("fastps.kernels.chaos.failpoints", reason="needs the failpoint build: make test-hooks")

import numpy as np  # noqa: E402

from tests.crash.test_die_at_every_store import CASES, ROWS, VICTIM, WIDTH, Job, dies_at  # noqa: E402
from tests.support.sizes import sample_and_full  # noqa: E402

CASE = next(case for case in CASES if case.name == "rows-sgd-asp")


def _table(job: Job, table: int) -> np.ndarray:
    return np.frombuffer(job.memory, np.float32, ROWS * WIDTH, job.arena.table_offset(table)).reshape(ROWS, WIDTH).copy()


def _killed_at(store: int) -> Job:
    job = Job(CASE)
    dies_at(store, lambda: job.live(pushes=1, leaves=False))
    return job


@sample_and_full(3, 1, "every")
def test_a_step_that_does_not_wait_may_see_rows_of_an_unfinished_fold_and_recovery_takes_them_back(every: int) -> None:
    after = Job(CASE)
    after.live(pushes=1, leaves=False)
    new = _table(after, 0)
    touched = new.any(axis=1)
    assert touched.sum() > 3
    seen_mixed = 0
    for store in range(1, 600, every):
        job = _killed_at(store)
        seen = _table(job, 0)
        is_new, is_old = (seen == new).all(axis=1), ~seen.any(axis=1)
        assert (is_new | is_old).all(), "a row is old or new here, because a death is between two rows"
        committed = job.arena.shard_version(0) > 0
        mixed = bool((is_new & touched).any() and (is_old & touched).any())
        assert not (mixed and committed)
        if committed:
            assert is_new.all()
            break
        seen_mixed += mixed
        job.lanes[0].recover_lock(VICTIM, 70)
        recovered = _table(job, 0)
        # The survivor also folds a push that was posted: then all rows are new.
        assert not recovered.any() or np.array_equal(recovered, new)
    else:
        pytest.fail("the victim never committed")
    assert seen_mixed > 2, "a reader can see rows of two versions"
