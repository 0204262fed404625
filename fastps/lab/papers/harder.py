"""The harder task: MNIST-5k, shifted, dimmed, noisy and of 14 x 14 pixels, on which stale gradients cost accuracy.

Rows that use it train on SEEDS, which no trial used; docs/papers/harder-task.md says what was fixed before they were measured.
"""

import numpy as np

from fastps.lab.demo.data import Bytes, Dataset, Labels, dataset_of, load

SEEDS = (11, 12, 13)
TRAINING_IMAGES, TEST_IMAGES = 17_000, 3_600
SHIFT = 3  # pixels of 28, each way
DIMMEST = 0.5
NOISE = 30.0  # of 255, a standard deviation


def harder() -> Dataset:
    """Return the task: copies of the 4,000 training images, and of the 1,000 test images, each spoiled in its own way."""
    plain = load("mnist5k")
    random = np.random.default_rng(2026)
    return dataset_of(
        *_copies(plain.train_images, plain.train_labels, TRAINING_IMAGES, random),
        *_copies(plain.test_images, plain.test_labels, TEST_IMAGES, random),
    )


def _copies(images: Bytes, labels: Labels, number: int, random: np.random.Generator) -> tuple[Bytes, Labels]:
    source = np.arange(number) % len(images)
    padded = np.pad(images[:, 0], ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT)))
    rows, columns = random.integers(0, 2 * SHIFT + 1, (2, number, 1)) + np.arange(28)
    shifted = padded[source[:, None, None], rows[:, :, None], columns[:, None, :]] * random.uniform(DIMMEST, 1, (number, 1, 1))
    pooled = shifted.reshape(number, 14, 2, 14, 2).mean((2, 4))
    noisy = pooled + random.normal(0, NOISE, pooled.shape)
    return noisy.clip(0, 255).astype(np.uint8)[:, None], labels[source]
