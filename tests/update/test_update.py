"""The update in C++ against its formula in numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tagi_ddp import _backend

FLOOR = np.float32(1e-5)
sizes = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 60)), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)
batches = st.sampled_from([1, 2, 256])  # of each cap factor


class Model:
    """Layers of random parameters in arrays of our own."""

    def __init__(self, layers: list[tuple[int, int]], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.table = _backend.Parameters()
        self.blocks: list[list[np.ndarray]] = []
        self.counters = []
        for i, counts in enumerate(layers):
            blocks = []
            for count in counts:
                mu, delta_mu, delta_var = rng.normal(size=(3, count)).astype(np.float32)
                # Many deltas beyond the cap, some variances that the delta takes below zero.
                var = rng.gamma(0.5, 0.3, count).astype(np.float32) + np.float32(1e-7)
                scale = np.float32(10.0 ** rng.uniform(-3, 1))
                blocks.append([mu, var, scale * delta_mu, scale * delta_var])
            counter = np.full(1, 99, np.int32)
            self.table.add_layer(f"layer {i}", *blocks, counter)
            self.blocks += blocks
            self.counters.append(counter)

    def flat(self, index: int) -> np.ndarray:
        return np.concatenate([block[index] for block in self.blocks])


def capped(
    mu: np.ndarray, var: np.ndarray, delta_mu: np.ndarray, delta_var: np.ndarray, cap: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The engine's step; also where the variance was not positive."""
    bar = np.sqrt(var) / np.float32(cap)
    new_mu = mu + np.sign(delta_mu) * np.minimum(np.abs(delta_mu), bar)
    new_var = var + np.sign(delta_var) * np.minimum(np.abs(delta_var), bar)
    return new_mu, np.where(new_var <= 0, FLOOR, new_var), new_var <= 0


def check(model: Model, expected: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    mu, var, negative = expected
    np.testing.assert_array_equal(model.flat(0), mu)
    np.testing.assert_array_equal(model.flat(1), var)
    bounds = np.cumsum([0] + [block[0].size for block in model.blocks])
    counts = [int(negative[a:b].sum()) for a, b in pairwise(bounds)]
    assert [int(counter[0]) for counter in model.counters] == counts[::2]
    assert model.table.negative_variances == counts[::2]


@given(layers=sizes, seed=seeds, batch=batches, times=st.sampled_from([1.0, 2.5]))
def test_apply_own(layers: list[tuple[int, int]], seed: int, batch: int, times: float) -> None:
    model = Model(layers, seed)
    cap = np.float32(times) * np.float32(_backend.cap_factor(batch))
    expected = capped(*(model.flat(i) for i in range(4)), cap)
    model.table.apply_own(batch, times)
    check(model, expected)


@given(seed=seeds, batch=batches)
def test_steps_of_any_size(seed: int, batch: int) -> None:
    """In runs without a step that is capped nothing is divided."""
    model, cap = Model([(600, 5)], seed), _backend.cap_factor(batch)
    rng = np.random.default_rng(seed)
    for _, var, *deltas in model.blocks:
        var[:] = np.float32(10.0) ** rng.uniform(-44, 37, var.size).astype(np.float32)
        around = np.float32(10.0) ** np.float32(rng.uniform(-3, 1))
        for delta in deltas:
            delta[:] = np.sign(delta) * np.sqrt(var) / np.float32(cap) * around
    expected = capped(*(model.flat(i) for i in range(4)), cap)
    model.table.apply_own(batch)
    check(model, expected)


@given(layers=sizes, seed=seeds, divisor=st.integers(1, 4))
def test_pack_and_apply(layers: list[tuple[int, int]], seed: int, divisor: int) -> None:
    model = Model(layers, seed)
    bucket = np.empty(2 * model.table.size, np.float32)
    model.table.pack(bucket)
    np.testing.assert_array_equal(bucket, np.concatenate([model.flat(2), model.flat(3)]))
    mean = [model.flat(i) / np.float32(divisor) for i in (2, 3)]
    expected = capped(model.flat(0), model.flat(1), *mean, 2.0)
    model.table.apply(bucket, divisor, 100)
    check(model, expected)


@given(layers=sizes, seed=seeds, data=st.data())
def test_sums_of_deltas(layers: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    model = Model(layers, seed)
    flags = data.draw(st.lists(st.booleans(), min_size=len(layers), max_size=len(layers)))
    bounds = np.cumsum([0] + [sum(counts) for counts in layers])
    mask = np.zeros(model.table.size, bool)
    for flag, (a, b) in zip(flags, pairwise(bounds), strict=True):
        mask[a:b] = flag
    mask = np.concatenate([mask, mask])
    deltas = np.concatenate([model.flat(2), model.flat(3)])
    sums = np.ones(2 * model.table.size, np.float32)
    model.table.add_deltas_to(sums, flags)
    np.testing.assert_array_equal(sums, np.where(mask, 1 + deltas, np.float32(1)))
    model.table.add_to_deltas(sums, flags)
    after = np.concatenate([model.flat(2), model.flat(3)])
    np.testing.assert_array_equal(after, np.where(mask, deltas + sums, deltas))


@given(layers=sizes, seed=seeds, data=st.data())
def test_first_not_finite(layers: list[tuple[int, int]], seed: int, data: st.DataObject) -> None:
    model = Model(layers, seed)
    assert model.table.first_not_finite() == ""
    occupied = [i for i, block in enumerate(model.blocks) if block[0].size]
    if not occupied:
        return
    block = data.draw(st.sampled_from(occupied))
    array = model.blocks[block][data.draw(st.sampled_from([2, 3]))]
    position = data.draw(st.integers(0, array.size - 1))
    array[position] = data.draw(st.sampled_from([np.inf, -np.inf, np.nan]))
    assert model.table.first_not_finite() == f"layer {block // 2}"
    array[position] = np.finfo(np.float32).max
    assert model.table.first_not_finite() == ""


@pytest.mark.parametrize(
    ("batch", "factor"), [(1, 0.1), (2, 2.0), (255, 2.0), (256, 3.0), (10**6, 3.0)]
)
def test_cap_factor(batch: int, factor: float) -> None:
    assert _backend.cap_factor(batch) == pytest.approx(factor)


@given(
    batches=st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(any),
    average=st.booleans(),
)
def test_agreement(batches: list[int], average: bool) -> None:
    agreement = _backend.Agreement([_backend.Contribution(b, finished=not b) for b in batches])
    active = sum(b > 0 for b in batches)
    assert (agreement.batch, agreement.active) == (sum(batches), active)
    assert agreement.applies
    assert not agreement.all_finished
    assert agreement.divisor(average) == (active if average else 1)
    share = -(-sum(batches) // active) if average else sum(batches)
    assert agreement.capped_as(average) == share


def test_agreement_refuses() -> None:
    ranks = [_backend.Contribution(4), _backend.Contribution(4, finite=False)]
    agreement = _backend.Agreement(ranks)
    assert not agreement.applies
    assert agreement.not_finite == [1]
    nobody = _backend.Agreement([_backend.Contribution(0, finished=True)] * 2)
    assert nobody.all_finished
    assert not nobody.applies


floats = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=30)
@given(
    state=arrays(np.float32, (2, 8), elements=floats), weights=st.tuples(*[st.integers(1, 9)] * 2)
)
def test_running_statistics(state: np.ndarray, weights: tuple[int, int]) -> None:
    from tagi_ddp.engine.layout import batch_norm_address
    from tagi_ddp.engine.loader import load_engine

    load_engine()
    import cutagi

    norms: list[Any] = [cutagi.BatchNorm2d(4, 1e-4, 0.9, True, 1.0, 1.0) for _ in range(2)]
    total = np.zeros(8, np.float32)
    tables = []
    for norm, values, weight in zip(norms, state, weights, strict=True):
        mean, var, *_ = _backend.batch_norm_statistics(batch_norm_address(norm))
        mean[:], var[:] = values[:4], values[4:]
        table = _backend.RunningStatistics()
        table.add_engine_layer(batch_norm_address(norm))
        packed = np.empty(table.size, np.float32)
        table.pack(packed, weight)
        total += packed
        tables.append(table)
    expected = (weights[0] * state[0] + weights[1] * state[1]) / np.float32(sum(weights))
    for norm, table in zip(norms, tables, strict=True):
        table.unpack(total, sum(weights))
        mean, var, _, _, first = _backend.batch_norm_statistics(batch_norm_address(norm))
        np.testing.assert_allclose(np.concatenate([mean, var]), expected, rtol=1e-5, atol=1e-4)
        assert first[0] == 0
