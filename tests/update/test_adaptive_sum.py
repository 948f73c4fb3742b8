"""Sums of changes, damped where ranks agree: against the formula, and what must hold for any."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tagi_ddp import _backend
from update.test_merge import change_of, gaussians, learned, table_of

FloatArray = np.ndarray
BLOCK = _backend.AdaptiveSum.BLOCK
layers_of = st.lists(st.tuples(st.integers(1, 700), st.integers(0, 40)), min_size=1, max_size=3)
seeds = st.integers(0, 2**32 - 1)


class Expected:
    """The formula of adaptive_sum.h, in float64."""

    def __init__(self, layers: list[tuple[int, int]], ranks: int) -> None:
        self.ranks = ranks
        ends = np.cumsum([0, *itertools.chain(*layers)])
        self.blocks = [
            slice(first, min(first + BLOCK, end))
            for begin, end in itertools.pairwise(ends)
            for first in range(begin, end, BLOCK)
        ]
        self.trust = np.ones(len(self.blocks))
        self.last: FloatArray | None = None

    def damped(self, changes: FloatArray, var0: FloatArray, steps: float) -> FloatArray:
        """Return what changes, [ranks, 2 size], of so many steps each, add up to."""
        precision, weighted = changes.sum(0)[: len(var0)], changes[:, len(var0) :]
        total = weighted.sum(0)
        damped, result = precision.copy(), total.copy()
        for i, block in enumerate(self.blocks):
            own, scale = weighted[:, block], var0[block]
            squares, along = (own**2 * scale).sum(), 0.0
            ratio = (total[block] ** 2 * scale).sum() / squares
            alike = np.clip((ratio - 1) / (self.ranks - 1), 0, 1)
            if self.last is not None and steps > 1:
                a, b = (v[block] * np.sqrt(scale) for v in (total, self.last))
                along = min(a @ b / (b @ b), 0)
                turn = a @ b / np.sqrt((a @ a) * (b @ b)) + 0.55
                self.trust[i] = np.clip(self.trust[i] + (0.3 * turn if turn > 0 else turn), 0, 1)
            surprise = squares / max((precision[block] * scale).sum(), 1e-300)
            counts = surprise**4 / (surprise**4 + 4.0**-4)
            trust, others = self.trust[i] if steps > 1 else 1.0, self.ranks - 1
            damped[block] /= 1 + others * counts * (1 - trust * (1 - alike))
            if along < 0:  # r times the sum before becomes r / (1 - r) times
                result[block] += (along / (1 - along) - along) * self.last[block]
            result[block] /= 1 + others * (1 - trust * (1 - counts * alike))
        self.last = total
        return np.concatenate([damped, result])


def summed(
    damping: Any, changes: list[FloatArray], prior: FloatArray, steps: float = 8
) -> tuple[FloatArray, list[float]]:
    """Return the damped sum of the ranks' changes, and their agreement."""
    described = []
    for change in changes:
        described.append(np.zeros(damping.described, np.float32))
        damping.describe(change.copy(), prior.copy(), steps, described[-1])
    total = np.sum(changes, axis=0)
    agreement = damping.damp(total, prior.copy(), sum(described[1:], described[0]), len(changes))
    return total, agreement


def moves(
    rng: np.random.Generator, table: _backend.Parameters, prior: FloatArray, ranks: int
) -> list[FloatArray]:
    """Return changes of ranks whose means move, though nobody knows better."""
    changes = [change_of(table, learned(rng, prior), prior) for _ in range(ranks)]
    for change in changes:
        change[: table.size] = 0
    return changes


@settings(max_examples=30, deadline=None)
@given(layers_of, st.integers(2, 6), seeds, st.permutations([1, 2, 8]))
def test_is_the_formula(
    layers: list[tuple[int, int]], ranks: int, seed: int, order: list[int]
) -> None:
    """Three merges in turn, after so many steps each."""
    rng, table = np.random.default_rng(seed), table_of(layers)
    damping = _backend.AdaptiveSum(table)
    expected = Expected(layers, ranks)
    assert damping.described == len(expected.blocks) + 1
    common = rng.normal(size=2 * table.size)
    for steps in order:
        prior = gaussians(rng, table.size)
        changes = []
        for _ in range(ranks):
            change = change_of(table, learned(rng, prior), prior)
            change[table.size :] += (common[: table.size] / np.sqrt(prior[table.size :])).astype(
                np.float32
            )
            changes.append(change)
        ours, agreement = summed(damping, changes, prior, steps=steps)
        variances = prior[table.size :].astype(float)
        exact = expected.damped(np.array(changes, np.float64), variances, steps)
        scale = np.abs(np.array(changes, np.float64)).sum(0)
        assert (np.abs(ours - exact) <= 1e-5 * scale).all()
        assert all(0 <= value <= 1 for value in agreement)


@settings(max_examples=30)
@given(st.integers(2, 16), st.integers(1, 600), seeds)
def test_equal_changes_are_averaged_and_orthogonal_ones_summed(
    ranks: int, size: int, seed: int
) -> None:
    rng, table = np.random.default_rng(seed), table_of([(size, 0)])
    prior = gaussians(rng, size)
    change = change_of(table, learned(rng, prior), prior)
    change[:size] = np.minimum(change[:size], 0)  # means move, and nobody knows better
    alike, agreement = summed(_backend.AdaptiveSum(table), [change] * ranks, prior)
    together, alone = prior.copy(), prior.copy()
    table.add_change(together, together, alike)
    table.add_change(alone, alone, change)
    moved = np.abs(alone[:size] - prior[:size])
    assert (np.abs(together[:size] - alone[:size]) <= 1e-3 * moved + 1e-5).all()
    np.testing.assert_allclose(agreement, 1, atol=1e-5)
    apart = [change.copy() for _ in range(ranks)]  # each has learned of other parameters
    for rank, own in enumerate(apart):
        own[size:][np.arange(size) % ranks != rank] = 0
    different, agreement = summed(_backend.AdaptiveSum(table), apart, prior)
    np.testing.assert_allclose(different[size:], change[size:], rtol=1e-4)
    np.testing.assert_allclose(agreement, 0, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(2, 16), seeds)
def test_moves_that_precisions_account_for_are_summed(ranks: int, seed: int) -> None:
    """Bayes' rule, however much alike they are."""
    rng, table = np.random.default_rng(seed), table_of([(256, 0)])  # one block
    prior = gaussians(rng, 256)
    change = change_of(table, learned(rng, prior), prior)
    change[:256] = np.abs(change[:256])
    growth, squares = change[:256] @ prior[256:], change[256:] ** 2 @ prior[256:]
    change[256:] *= np.sqrt(0.01 * growth / squares)
    total, agreement = summed(_backend.AdaptiveSum(table), [change] * ranks, prior)
    np.testing.assert_allclose(total, ranks * change, rtol=1e-3)
    np.testing.assert_allclose(agreement, 1, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(2, 16), seeds)
def test_sums_that_turn_back_are_averaged_in_the_end(ranks: int, seed: int) -> None:
    """Merge changes whose sign alternates. In the end a merge is half of the ranks' mean."""
    rng, table = np.random.default_rng(seed), table_of([(300, 0)])
    prior, damping = gaussians(rng, 300), _backend.AdaptiveSum(table)
    changes = moves(rng, table, prior, ranks)
    for sign in (1, -1, 1, -1, 1, -1):
        total, _ = summed(damping, [sign * change for change in changes], prior)
        start = sign * np.sum(changes, axis=0)[300:]
    scale = np.abs(np.array(changes)).sum(0)[300:]
    assert (np.abs(total[300:] - start / ranks / 2) <= 1e-6 * scale).all()
    damping.restart()
    again, _ = summed(damping, changes, prior)
    fresh, _ = summed(_backend.AdaptiveSum(table), changes, prior)
    assert again.tolist() == fresh.tolist()


@settings(max_examples=20)
@given(st.integers(2, 16), seeds)
def test_precisions_count_where_sums_turn_back_for_noise(ranks: int, seed: int) -> None:
    """Alternate the sign of the means' changes. The growth of precisions is still summed."""
    rng, table = np.random.default_rng(seed), table_of([(256, 0)])
    prior, damping = gaussians(rng, 256), _backend.AdaptiveSum(table)
    changes = [change_of(table, learned(rng, prior), prior) for _ in range(ranks)]
    for change in changes:
        change[:256] = 1e4 / prior[256:]
    for sign in (1, -1, 1, -1, 1, -1):
        turned = [np.concatenate([change[:256], sign * change[256:]]) for change in changes]
        total, _ = summed(damping, turned, prior)
    np.testing.assert_allclose(total[:256], ranks * 1e4 / prior[256:], rtol=1e-3)
    scale = np.abs(np.array(turned)).sum(0)[256:]
    assert (np.abs(total[256:] - np.sum(turned, axis=0)[256:] / ranks / 2) <= 1e-6 * scale).all()


@settings(max_examples=20)
@given(st.integers(2, 16), st.floats(0.01, 1), seeds)
def test_a_sum_that_overshot_ends_where_the_turns_lead(
    ranks: int, overshot: float, seed: int
) -> None:
    """A sum of S that goes ``overshot`` too far ends at S / (1 + overshot) from its start."""
    rng, table = np.random.default_rng(seed), table_of([(256, 0)])
    prior, damping = gaussians(rng, 256), _backend.AdaptiveSum(table)
    first, second = np.zeros((2, ranks, 512), np.float32)
    owner = np.arange(128) % ranks  # so that no two ranks' changes are alike
    moved = (rng.normal(size=128) / np.sqrt(prior[256:384])).astype(np.float32)
    other = (2 * moved * np.sqrt(prior[256:384] / prior[384:])).astype(np.float32)
    first[owner, 256 + np.arange(128)] = moved
    second[owner, 256 + np.arange(128)] = -overshot * moved
    second[owner, 384 + np.arange(128)] = other
    start, _ = summed(damping, list(first), prior)
    total, _ = summed(damping, list(second), prior)
    ended = start[256:384] + total[256:384]
    np.testing.assert_allclose(ended, moved / (1 + overshot), rtol=1e-4)
    np.testing.assert_allclose(total[384:], other, rtol=1e-5)


@settings(max_examples=20)
@given(st.integers(2, 16), seeds)
def test_single_steps_that_turn_back_are_summed(ranks: int, seed: int) -> None:
    rng, table = np.random.default_rng(seed), table_of([(300, 0)])
    prior, damping = gaussians(rng, 300), _backend.AdaptiveSum(table)
    changes = moves(rng, table, prior, ranks)
    fresh, _ = summed(damping, changes, prior, steps=1)
    for _ in range(3):
        back, _ = summed(damping, [-change for change in changes], prior, steps=1)
        again, _ = summed(damping, changes, prior, steps=1)
    assert back[300:].tolist() == (-fresh[300:]).tolist()
    assert again[300:].tolist() == fresh[300:].tolist()


@settings(max_examples=20)
@given(st.permutations(range(5)), seeds)
def test_the_order_of_ranks_does_not_matter(order: list[int], seed: int) -> None:
    rng, table = np.random.default_rng(seed), table_of([(400, 7)])
    prior = gaussians(rng, 407)
    changes = [change_of(table, learned(rng, prior), prior) for _ in range(5)]
    first, agreement = summed(_backend.AdaptiveSum(table), changes, prior)
    mixed = [changes[rank] for rank in order]
    other, same = summed(_backend.AdaptiveSum(table), mixed, prior)
    scale = np.abs(np.array(changes)).sum(0)
    assert (np.abs(first - other) <= 1e-5 * scale).all()
    np.testing.assert_allclose(same, agreement, atol=1e-5)


@settings(max_examples=20)
@given(st.integers(2, 8), seeds)
def test_it_makes_no_difference_when_a_change_arrives(ranks: int, seed: int) -> None:
    """A rank that goes on from its own posterior gets where one that waited with the prior gets."""
    rng, table = np.random.default_rng(seed), table_of([(300, 5)])
    prior = gaussians(rng, 305)
    posteriors = [learned(rng, prior) for _ in range(ranks)]
    changes = [change_of(table, posterior, prior) for posterior in posteriors]
    total, _ = summed(_backend.AdaptiveSum(table), changes, prior)
    waited, went_on = prior.copy(), posteriors[0].copy()
    table.add_change(waited, waited, total)
    table.add_change(went_on, prior, total, changes[0])
    mean, var = np.split(waited.astype(np.float64), 2)
    other_mean, other_var = np.split(went_on.astype(np.float64), 2)
    assert (var > 0).all()
    np.testing.assert_allclose(other_var, var, rtol=1e-5)
    own = np.abs(posteriors[0][:305] - prior[:305])
    assert (np.abs(other_mean - mean) <= 1e-4 * (np.sqrt(var) + own + np.abs(mean))).all()


def test_what_is_not_finite_counts_as_nothing() -> None:
    rng, table = np.random.default_rng(0), table_of([(512, 0)])
    prior = gaussians(rng, 512)
    changes = [change_of(table, learned(rng, prior), prior) for _ in range(3)]
    changes[1][512 + 5] = np.nan
    changes[2][512 + 300] = np.inf
    damping = _backend.AdaptiveSum(table)
    total, agreement = summed(damping, changes, prior)
    bad = [512 + 5, 512 + 300]
    assert not np.isfinite(total[bad]).any()
    assert np.isfinite(np.delete(total, bad)).all()
    assert np.isfinite(agreement).all()
    again, _ = summed(damping, [np.nan_to_num(c, posinf=0) for c in changes], prior)
    assert np.isfinite(again).all()
