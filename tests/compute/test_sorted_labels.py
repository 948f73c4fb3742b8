"""The warning about rows that are sorted by label."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.compute.sorted_labels import SortedLabels


def looks(labels: np.ndarray, batch: int, classes: int, one_hot: bool = True) -> int:
    """Return the number of warnings in one pass over the labels in their order."""
    own, count = SortedLabels(), 0
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for begin in range(0, len(labels), batch):
            part = labels[begin : begin + batch]
            rows = np.eye(classes, dtype=np.float32)[part] if one_hot else part[:, None] * 0 + 1.0
            selected = None if one_hot else part[:, None].astype(np.int32)
            if not own.look(len(part), rows.ravel(), selected):
                break
        count = len(found)
    assert all("shuffle the rows" in str(each.message) for each in found)
    return count


@given(
    classes=st.integers(2, 10),
    each=st.integers(130, 2000),
    batch=st.integers(1, 60),
    one_hot=st.booleans(),
)
def test_sorted_rows_warn_once(classes: int, each: int, batch: int, one_hot: bool) -> None:
    labels = np.repeat(np.arange(classes), max(each, 4 * batch))
    assert looks(labels, batch, classes, one_hot) == 1


@given(
    shares=st.lists(st.floats(0.001, 1.0), min_size=2, max_size=6),
    batch=st.integers(1, 64),
    seed=st.integers(0, 2**32 - 1),
)
def test_shuffled_rows_do_not(shares: list[float], batch: int, seed: int) -> None:
    """However rare some classes are."""
    weights = np.array(shares) / sum(shares)
    labels = np.random.default_rng(seed).choice(len(shares), 4000, p=weights)
    assert looks(labels, batch, len(shares)) == 0


def test_one_class_alone_does_not() -> None:
    assert looks(np.zeros(4000, np.int64), 20, 3) == 0


@pytest.mark.parametrize("values", [np.full(20, np.nan, np.float32), None])
def test_no_observation_is_no_label(values: np.ndarray | None) -> None:
    own = SortedLabels()
    assert all(own.look(20, values, None) for _ in range(100))


def test_a_regression_does_not() -> None:
    own, rng = SortedLabels(), np.random.default_rng(0)
    assert all(own.look(20, np.sort(rng.normal(size=20)), None) for _ in range(1000))
