"""Merging by Bayes' rule, against its formula in float64 and where the answer is known."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tagi_ddp import _backend

FloatArray = np.ndarray
sizes = st.lists(st.tuples(st.integers(1, 2500), st.integers(0, 40)), min_size=1, max_size=3)
seeds = st.integers(0, 2**32 - 1)


def table_of(layers: list[tuple[int, int]]) -> _backend.Parameters:
    table = _backend.Parameters()
    for i, counts in enumerate(layers):
        blocks = [[np.zeros(count, np.float32) for _ in range(4)] for count in counts]
        table.add_layer(f"layer {i}", *blocks, np.zeros(1, np.int32))
    return table


def gaussians(rng: np.random.Generator, size: int, spread: float = 1.0) -> FloatArray:
    """[means | variances], the variances over six decades."""
    mu = spread * rng.normal(size=size)
    return np.concatenate([mu, 10.0 ** rng.uniform(-5, 1, size)]).astype(np.float32)


def learned(rng: np.random.Generator, prior: FloatArray) -> FloatArray:
    """A posterior of the prior: of less variance, elsewhere."""
    mu, var = np.split(prior.astype(np.float64), 2)
    posterior = var * rng.uniform(0.05, 1, mu.size)
    mu = mu + np.sqrt(var) * rng.normal(size=mu.size)
    return np.concatenate([mu, posterior]).astype(np.float32)


def bayes(prior: FloatArray, posteriors: list[FloatArray]) -> FloatArray:
    """The merge as the contract has it, in float64."""
    mu0, var0 = np.split(prior.astype(np.float64), 2)
    mus, variances = np.split(np.array(posteriors, np.float64), 2, axis=1)
    precision = 1 / var0 + (1 / variances - 1 / var0).sum(0)
    mu = mu0 + ((mus - mu0) / variances).sum(0) / precision
    return np.concatenate([mu, 1 / precision])


def assert_close(ours: FloatArray, exact: FloatArray, tolerance: float = 1e-6) -> None:
    """Variances relative to themselves, means to a standard deviation or themselves."""
    mu, var = np.split(ours, 2)
    exact_mu, exact_var = np.split(exact, 2)
    np.testing.assert_allclose(var, exact_var, rtol=tolerance)
    scale = np.sqrt(exact_var) + np.abs(exact_mu)
    assert (np.abs(mu - exact_mu) <= tolerance * scale).all()


def change_of(table: _backend.Parameters, now: FloatArray, before: FloatArray) -> FloatArray:
    change = np.empty_like(now)
    table.change_since(now, before, change)
    return change


@settings(max_examples=25)
@given(sizes, st.integers(1, 8), seeds)
def test_is_bayes_rule(layers: list[tuple[int, int]], ranks: int, seed: int) -> None:
    rng, table = np.random.default_rng(seed), table_of(layers)
    prior = gaussians(rng, table.size)
    posteriors = [learned(rng, prior) for _ in range(ranks)]
    merged = prior.copy()
    total = sum(change_of(table, posterior, prior) for posterior in posteriors)
    assert table.add_change(merged, merged, total) == [0] * len(layers)
    assert_close(merged, bayes(prior, posteriors), 3e-6)


@settings(max_examples=40)
@given(st.integers(2, 6), st.integers(1, 30), seeds, st.data())
def test_changes_arrive_in_any_order(ranks: int, size: int, seed: int, data: st.DataObject) -> None:
    """Each rank begins with the prior and what it has seen, and takes the others' as they come."""
    rng, table = np.random.default_rng(seed), table_of([(size, 0)])
    prior = gaussians(rng, size)
    posteriors = [learned(rng, prior) for _ in range(ranks)]
    changes = [change_of(table, posterior, prior) for posterior in posteriors]
    for rank in range(ranks):
        current = posteriors[rank].copy()
        others = [other for other in range(ranks) if other != rank]
        for other in data.draw(st.permutations(others)):
            table.add_change(current, prior, changes[other])
        assert_close(current, bayes(prior, posteriors), 3e-6)


@settings(max_examples=25)
@given(st.integers(1, 2000), seeds)
def test_own_work_is_not_counted_twice(size: int, seed: int) -> None:
    """Merge a change into a posterior that has moved on since, but has its own part of it."""
    rng, table = np.random.default_rng(seed), table_of([(size, 0)])
    prior = gaussians(rng, size)
    mine, other = learned(rng, prior), learned(rng, prior)
    own = change_of(table, mine, prior)
    later = learned(rng, mine)
    current = later.copy()
    table.add_change(current, prior, own + change_of(table, other, prior), own)
    exact = later.astype(np.float64)  # as a prior of its own, and the other's change beside it
    mu0, var0 = np.split(prior.astype(np.float64), 2)
    mu, var = np.split(other.astype(np.float64), 2)
    precision = 1 / exact[size:] + 1 / var - 1 / var0
    mean = (exact[:size] / exact[size:] + mu / var - mu0 / var0) / precision
    assert_close(current, np.concatenate([mean, 1 / precision]), 3e-6)


@settings(max_examples=50)
@given(st.integers(1, 1100), seeds, st.sampled_from([0.5, 3.0, 1e3, 1e30]))
def test_a_precision_never_falls_below_a_tenth(size: int, seed: int, factor: float) -> None:
    rng, table = np.random.default_rng(seed), table_of([(size, 0)])
    prior = gaussians(rng, size)
    mu0, var0 = np.split(prior.astype(np.float64), 2)
    change = np.concatenate(
        [-factor * rng.uniform(0, 1, size) / var0, rng.normal(size=size) / var0]
    )
    change = np.clip(change, -3e38, 3e38).astype(np.float32)
    merged = prior.copy()
    [guarded] = table.add_change(merged, prior, change)
    mu, var = np.split(merged.astype(np.float64), 2)
    whole = 1 + change[:size].astype(np.float64) * var0
    assert guarded == np.count_nonzero(whole <= 0.1)
    assert np.isfinite(merged).all()
    assert (var > 0).all()
    assert (var <= 10.001 * var0).all()
    # A half, a quarter, ...: the greatest part that leaves enough, of both halves of the change.
    weight = np.where(whole > 0.1, 1, 0.5 ** np.ceil(np.log2(np.maximum(1, (1 - whole) / 0.9))))
    expected = var0 / (1 + weight * change[:size].astype(np.float64) * var0)
    close = np.isclose(var, expected, rtol=1e-5)
    assert (close | (np.abs(whole - 0.1) < 1e-5)).all()
    moved = weight * change[size:].astype(np.float64) * expected
    np.testing.assert_allclose((mu - mu0)[close], moved[close], atol=1e-3 * np.abs(mu0).max())


def test_a_change_that_is_not_finite_is_left_out() -> None:
    table = table_of([(1500, 0), (3, 2)])
    prior = np.concatenate([np.zeros(1505), np.ones(1505)]).astype(np.float32)
    change = np.ones(2 * 1505, np.float32)
    bad = {3: np.nan, 1504: -np.inf, 1505 + 1501: np.nan, 1505 + 7: np.inf}
    for at, value in bad.items():
        change[at] = value
    merged = prior.copy()
    assert table.add_change(merged, prior, change) == [2, 2]
    mu, var = np.split(merged, 2)
    kept = [3, 7, 1501, 1504]
    assert mu[kept].tolist() == [0] * 4
    assert var[kept].tolist() == [1] * 4
    assert (np.delete(mu, kept) == 0.5).all()
    assert (np.delete(var, kept) == 0.5).all()


@given(st.lists(st.floats(0.01, 0.6), min_size=1, max_size=6))
def test_relation_to_the_sum_of_deltas(parts: list[float]) -> None:
    """With x = -dvar / v0: the sum gives v0 (1 - sum x), a merge v0 / (1 + sum x / (1 - x))."""
    table, prior = table_of([(1, 0)]), np.array([0, 2], np.float32)
    total = sum(
        change_of(table, np.array([0, 2 * (1 - x)], np.float32), prior).astype(np.float64)
        for x in parts
    )
    merged = prior.copy()
    table.add_change(merged, prior, total.astype(np.float32))
    expected = 2 / (1 + sum(x / (1 - x) for x in parts))
    assert abs(merged[1] / expected - 1) < 1e-5
    assert merged[1] > 0  # where sum x >= 1, too, and the sum of deltas is not


def test_posteriors_are_read_and_written() -> None:
    table = _backend.Parameters()
    blocks = [[np.full(count, i, np.float32) for i in range(4)] for count in (3, 2)]
    table.add_layer("layer", *blocks, np.zeros(1, np.int32))
    flat = np.empty(10, np.float32)
    table.read_posterior(flat)
    assert flat.tolist() == [0] * 5 + [1] * 5
    table.write_posterior(np.arange(10, dtype=np.float32))
    assert [block[0].tolist() for block in blocks] == [[0, 1, 2], [3, 4]]
    assert [block[1].tolist() for block in blocks] == [[5, 6, 7], [8, 9]]
    assert [block[2].tolist() for block in blocks] == [[2] * 3, [2] * 2]
