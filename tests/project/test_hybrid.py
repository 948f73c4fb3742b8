"""The state-space model of examples/hybrid.py, against what defines it."""

from __future__ import annotations

from typing import Any

import hybrid
import numpy as np
import tourism
from hybrid import LEVEL, NOISE, SEASONAL, SHARE, STAYS, TREND, Hybrid
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_pool import RankPool

Z, OF_Z, LOG_NOISE = 0.2, 0.3, np.log(0.1)


class Known:
    """A network whose outputs are known: its mean, and the logarithm of a noise that is sure."""

    def reset_lstm_states(self) -> None:
        pass

    def forward(self, mean: Any, variance: Any) -> tuple[list[float], list[float]]:
        return [Z, LOG_NOISE], [OF_Z, 1e-12]

    def set_delta_z(self, mean: Any, variance: Any) -> None:
        pass

    backward = step = reset_lstm_states


def joint(count: int, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean and covariance of a series' values, and their covariance with its trend."""
    time = np.arange(1, count + 1)
    of_level, of_trend = np.diag(hybrid.PRIOR_VARIANCE)[[LEVEL, TREND]]
    before = share * np.tri(count, k=-1) + np.eye(count)  # of each noise in each value
    covariance = of_level + of_trend * np.outer(time, time) + OF_Z * np.eye(count)
    covariance += np.exp(LOG_NOISE) * before @ before.T
    return hybrid.PRIOR_MEAN[TREND] * time + Z, covariance, of_trend * time


@given(st.integers(0, 2**32 - 1), st.floats(-3, 3))
@settings(max_examples=20, deadline=None)
def test_a_linear_model_is_filtered_and_smoothed_exactly(seed: int, share: float) -> None:
    """If the share of the noise that stays is sure, all values are jointly normal."""
    values = [np.random.default_rng(seed + i).normal(size=count) for i, count in enumerate((9, 6))]
    model = Hybrid(values, 2, 0, wrap=lambda network: Known())
    model.first_mean[:, SHARE] = share
    model.first_variance[:, SHARE, SHARE] = 0
    steps: list[Any] = []
    inner = model._step

    def step(rows: Any, *args: Any) -> Any:
        found = inner(rows, *args)
        steps.append((rows, found[0]))
        return found

    model._step = step
    model.train(np.arange(2))
    for row, own in enumerate(values):
        mean, covariance, with_trend = joint(len(own), 1 / (1 + np.exp(-share)))
        error = own - mean - own[:2].mean()  # The level begins with the mean of the first season.
        for place in range(len(own)):
            rows, (found, of_found) = steps[place]
            at = rows.tolist().index(row)
            known = slice(0, place)
            gain = np.linalg.solve(covariance[known, known], covariance[known, place])
            np.testing.assert_allclose(own[place] - found[at], error[place] - gain @ error[known])
            expected = covariance[place, place] - gain @ covariance[known, place]
            np.testing.assert_allclose(of_found[at], expected, rtol=1e-6)
        trend = hybrid.PRIOR_MEAN[TREND] + with_trend @ np.linalg.solve(covariance, error)
        np.testing.assert_allclose(model.first_mean[row, TREND], trend, rtol=1e-5, atol=1e-6)
        rest = hybrid.PRIOR_VARIANCE[TREND, TREND]
        rest -= with_trend @ np.linalg.solve(covariance, with_trend)
        np.testing.assert_allclose(model.first_variance[row, TREND, TREND], rest, rtol=1e-5)


def test_what_stays_of_the_noise_is_its_product_with_the_share() -> None:
    rng = np.random.default_rng(0)
    root = 0.3 * rng.normal(size=(7, 7))
    mean, variance = rng.normal(size=7), root @ root.T
    samples = rng.multivariate_normal(mean, variance, 1_000_000)
    share = 1 / (1 + np.exp(-mean[SHARE]))
    linear = share + share * (1 - share) * (samples[:, SHARE] - mean[SHARE])
    samples[:, STAYS] = linear * samples[:, NOISE]
    found_mean, found = mean[None].copy(), variance[None].copy()
    hybrid._add_what_stays(found_mean, found)
    np.testing.assert_allclose(found_mean[0], samples.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(found[0], np.cov(samples.T), atol=4e-3)


class Pupil(Known):
    """A network that keeps its innovation."""

    def set_delta_z(self, mean: Any, variance: Any) -> None:
        self.innovation = mean, variance


def test_the_noise_is_learned_from_the_square_of_its_error() -> None:
    """The moments of the noise's logarithm, its variance and its square are those of samples."""
    rng = np.random.default_rng(2)
    log_noise, spread, error, rest = -0.5, 0.15, 0.9, 0.2
    logs = log_noise + np.sqrt(spread) * rng.normal(size=4_000_000)
    noises = np.exp(logs)
    squares = noises * rng.normal(size=len(logs)) ** 2
    covariance = np.cov([logs, noises, squares])
    gains = covariance[0, 1] / covariance[1, 1], covariance[1, 2] / covariance[2, 2]
    change = gains[0] * gains[1] * (error**2 + rest - squares.mean())
    of_square = 2 * rest**2 + 4 * error**2 * rest
    of_change = (gains[0] * gains[1]) ** 2 * (of_square - covariance[2, 2])

    pupil = Pupil()
    model = Hybrid([np.zeros(4)], 4, 0, wrap=lambda network: pupil)
    before, after = ((np.zeros((1, 7)), np.zeros((1, 7, 7))) for _ in range(2))
    before[1][:, SEASONAL, SEASONAL], after[1][:, SEASONAL, SEASONAL] = 0.4, 0.3
    after[0][:, SEASONAL] = 0.1
    before[1][:, NOISE, NOISE], after[1][:, NOISE, NOISE] = np.exp(log_noise + spread / 2), rest
    after[0][:, NOISE] = error
    model._teach(np.array([0]), before, after, np.array([spread]))
    mean, variance = pupil.innovation
    np.testing.assert_allclose(mean, [0.1 / 0.4, change / spread], rtol=0.02)
    np.testing.assert_allclose(variance, [-0.1 / 0.4**2, of_change / spread**2], rtol=0.02)


class Wild(Known):
    """A network whose states have grown without bound."""

    wild = True

    def reset_lstm_states(self) -> None:
        self.wild = False

    def forward(self, mean: Any, variance: Any) -> Any:
        return ([0, np.nan], [1e30, 1]) if self.wild else super().forward(mean, variance)


def test_a_network_whose_states_grow_without_bound_forgets_them() -> None:
    network = Wild()
    model = Hybrid([np.zeros(4)], 4, 0, wrap=lambda _: network)
    model.train(np.arange(1))
    network.wild = True
    assert np.isfinite(model.forecast(np.arange(1), 3)).all()
    assert not network.wild


def seasonal(count: int, seed: int) -> np.ndarray:
    """Return a quarterly series with a level, a trend and a season."""
    time, rng = np.arange(count), np.random.default_rng(seed)
    return 100 + 2 * time + 20 * np.sin(np.pi / 2 * time) + rng.normal(0, 2, count)


def forecasts(comm: Any, epochs: int = 15) -> np.ndarray:
    known = [seasonal(count, seed)[:-8] for seed, count in enumerate((48, 60, 40))]
    return np.array(tourism.predict_all(known, 4, 8, epochs, 2, comm))


def test_forecasts_follow_level_trend_and_season_on_any_number_of_ranks(shm: RankPool) -> None:
    known = [seasonal(count, seed) for seed, count in enumerate((48, 60, 40))]
    future = np.array([one[-8:] for one in known])
    known = [one[:-8] for one in known]
    (mean, variance), other = shm.run(forecasts, size=2)
    deviation, scaled, coverage = tourism.scores(known, future, mean, variance, 4)
    naive = np.array([np.resize(one[-4:], 8) for one in known])
    assert scaled < 0.7 * tourism.scores(known, future, naive, 0 * naive, 4)[1]
    assert deviation < 0.06
    assert coverage > 0.75
    np.testing.assert_array_equal(other, [mean, variance])
    np.testing.assert_array_equal(forecasts(None), [mean, variance])


def test_an_outlier_leaves_the_model_finite() -> None:
    values = seasonal(40, 0) / 50
    values[20] = 1e6
    model = Hybrid([values], 4, 0)
    for _ in range(3):
        model.train(np.arange(1))
    assert np.isfinite(model.forecast(np.arange(1), 8)).all()
