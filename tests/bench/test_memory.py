"""The memory of a whole job: no process of it keeps a model that it does not need."""

import pytest

from fastps.bench import memory

WORKERS, WIDTH = 3, 640
KINDS = ("Pss_Anon:", "Pss_Shmem:")  # not libraries, of whose memory other programs take a share while they run
MODEL_BYTES = 4 * memory.LAYERS * WIDTH * (WIDTH + 1)
# Gradients, versions and momenta, at most, as docs/benchmarks.md counts them. A worker that never waits has two gradients, and
# reads a version of its own: busy cores let the workers touch every buffer of weights that the arena has.
MODELS = {"bsp": WORKERS + 2 + 2, "asp": 2 * WORKERS + WORKERS + 3 + 2}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_has_the_models_that_its_discipline_needs_and_no_other() -> None:
    torch_bytes, _ = memory._run(("torch", ""), "sgd", WORKERS, 1, KINDS)
    for sync, models in MODELS.items():
        taken, _ = memory._run(("fastps", sync), "sgd", WORKERS, WIDTH, KINDS)
        print(sync, (taken - torch_bytes) / MODEL_BYTES)
        assert (taken - torch_bytes) / MODEL_BYTES < models + 1.5  # where each worker keeps one more: WORKERS
