"""The Hogwild example learns real digits alone and with two workers, and no update is lost."""

import pytest

from tests.support import example_programs

SMALL = ("--images", "1024", "--epochs", "4", "--lr", "0.05")
UPDATES_OF_A_WORKER = 4 * 1024 // 64


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", example_programs.WAYS)
def test_it_learns_digits_and_no_update_is_lost(way: str) -> None:
    figures, shown = example_programs.figures(way, "hogwild_mnist/main.py", *SMALL)
    workers = example_programs.workers_of(way)
    assert figures["updates"] == workers * UPDATES_OF_A_WORKER
    assert figures["accuracy"] > 0.5, "a guess is right in 10 %"
    assert all(f"worker {rank}: epoch 4 of 4" in shown for rank in range(workers))


@pytest.mark.slow
def test_the_plain_program_learns_the_same_task() -> None:
    figures, _ = example_programs.figures("alone", "hogwild_mnist/plain.py", *SMALL, "--workers", "2")
    assert figures["accuracy"] > 0.5
