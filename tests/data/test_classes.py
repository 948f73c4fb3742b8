"""Classes as a tree: as pytagi's, and scores of probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tagi_ddp.data import ClassTree, class_scores, reliability


@settings(max_examples=60, deadline=None)
@given(
    classes=st.integers(2, 40),
    samples=st.integers(1, 6),
    scale=st.sampled_from([0.1, 1, 10]),
    seed=st.integers(0, 2**31),
)
def test_as_pytagi(classes: int, samples: int, scale: float, seed: int) -> None:
    from pytagi import HRCSoftmaxMetric, Utils

    tree, metric = ClassTree(classes), HRCSoftmaxMetric(classes)
    assert tree.outputs == metric.hrc_softmax.len
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    mu_obs, selected = tree.decisions(labels)
    theirs, numbers, depth = Utils().label_to_obs(labels.astype(np.int32), classes)
    assert mu_obs.ravel().tolist() == list(theirs)
    assert selected.ravel().tolist() == list(numbers)
    assert mu_obs.shape == selected.shape == (samples, depth)
    mean = (scale * rng.normal(size=(samples, tree.outputs))).astype(np.float32)
    variance = rng.uniform(0.01, 1, mean.shape).astype(np.float32)
    found = tree.probabilities(mean.ravel(), variance)
    one_by_one = np.array(
        [
            Utils().obs_to_label_prob(m, v, metric.hrc_softmax, classes)
            for m, v in zip(mean, variance, strict=True)
        ],
        np.float64,
    )
    total = one_by_one.sum(axis=1, keepdims=True)
    some = total[:, 0] > 1e-20  # pytagi's round to 0, all of them, where outputs lead to no class
    expected = one_by_one[some] / total[some]
    np.testing.assert_allclose(found[some], expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1)


def test_far_decisions_keep_their_order() -> None:
    """Both probabilities of such a decision round to 0 and 1 in float32."""
    tree = ClassTree(3)
    found = tree.probabilities(np.full(tree.outputs, 60.0), np.zeros(tree.outputs))
    assert np.isfinite(found).all()
    assert found.max() == pytest.approx(1)


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    bins=st.integers(1, 12),
    seed=st.integers(0, 2**31),
)
def test_scores(labels: list[int], bins: int, seed: int) -> None:
    given_ = np.random.default_rng(seed).dirichlet(np.ones(4), len(labels))
    scores, found = class_scores(given_, labels, bins), reliability(given_, labels, bins)
    best = [max(range(4), key=row.__getitem__) for row in given_]
    assert scores.error == pytest.approx(
        np.mean([b != y for b, y in zip(best, labels, strict=True)])
    )
    logs = [math.log(row[y]) for row, y in zip(given_, labels, strict=True)]
    assert scores.log_likelihood == pytest.approx(np.mean(logs))
    assert found.counts.sum() == len(labels)
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        here = [
            i for i, row in enumerate(given_) if low <= max(row) < high or (high == 1 <= max(row))
        ]
        assert found.counts[number] == len(here)
        if here:
            confidence = np.mean([max(given_[i]) for i in here])
            accuracy = np.mean([best[i] == labels[i] for i in here])
            assert found.confidence[number] == pytest.approx(confidence)
            assert found.accuracy[number] == pytest.approx(accuracy)
            total += len(here) * abs(confidence - accuracy)
    assert scores.calibration_error == pytest.approx(total / len(labels))


def test_wrong_arguments() -> None:
    tree = ClassTree(10)
    with pytest.raises(ValueError, match="count"):
        ClassTree(1)
    with pytest.raises(ValueError, match="labels go from 3 to 10; give numbers from 0 to 9"):
        tree.decisions([3, 10])
    with pytest.raises(TypeError, match="labels must be whole numbers"):
        tree.decisions([0.5])
    with pytest.raises(ValueError, match="mean has 10 and variance 10 elements; give the 11"):
        tree.probabilities(np.zeros(10), np.ones(10))
    with pytest.raises(ValueError, match="variance 22 elements"):
        tree.probabilities(np.zeros(11), np.ones(22))
    for probabilities, labels in (
        (np.ones(3), [0, 1, 2]),
        (np.ones((2, 3)), [0]),
        (np.ones((0, 3)), []),
    ):
        with pytest.raises(ValueError, match="probabilities has"):
            class_scores(probabilities, labels)
    with pytest.raises(ValueError, match="labels go from 3 to 3; give numbers from 0 to 2"):
        class_scores(np.ones((1, 3)), [3])
