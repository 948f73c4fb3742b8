"""Level and trend beside an LSTM: a state-space model whose innovations train the network.

An observation is the sum of a level with a trend, of the LSTM's output, which repeats what comes
with the season, and of noise, a part of which stays. The LSTM sees its own last season. Its second
output is the logarithm of the noise's variance. All parts are learned together. The model is that
of V.-D. Vuong, L.-H. Nguyen, J.-A. Goulet, Coupling LSTM neural networks and state-space models
through analytically tractable inference, International Journal of Forecasting, 2025.
Many series go in lockstep, each with a network of its own: numpy filters all of them at once.
"""

import numpy as np
import pytagi
from pytagi.nn import LSTM, Linear, Sequential

from tagi_ddp import accelerate

LEVEL, TREND, SMOOTHED, SHARE, STAYS, NOISE, SEASONAL = STATES = range(7)
NEXT = np.zeros((7, 7))  # the transition from one period to the next
for after, before in ((LEVEL, LEVEL), (LEVEL, TREND), (TREND, TREND), (SHARE, SHARE)):
    NEXT[after, before] = 1
NEXT[SMOOTHED, [SMOOTHED, STAYS]] = 1
SEEN = np.isin(STATES, (LEVEL, SMOOTHED, NOISE, SEASONAL)).astype(float)
LARGEST = 1e4  # of a network's outputs: series are standardised
PRIOR_MEAN = np.array([0, 0.01, 0, 0.3, 0, 0, 0])  # SHARE is the sigmoid's argument
PRIOR_VARIANCE = np.diag([0.1, 0.1, 0, 0.01, 0, 0, 0])


class Hybrid:
    """The models of several series, standardised arrays of any lengths, of ``season`` periods."""

    def __init__(self, series, season, seed, units=50, wrap=accelerate):
        self.series, self.season = series, season
        self.lengths = np.array([len(one) for one in series])
        pytagi.manual_seed(seed)
        self.networks = [
            wrap(Sequential(LSTM(season + 1, units, 1), Linear(units, 2))) for _ in series
        ]
        self.first_mean = np.tile(PRIOR_MEAN, (len(series), 1))
        self.first_variance = np.tile(PRIOR_VARIANCE, (len(series), 1, 1))
        phase = np.arange(season) - (season - 1) / 2
        self.phase = phase / max(phase.std(), 1)

    def train(self, rows):
        """Pass once over the series with these numbers."""
        self.mean, self.variance = self.first_mean.copy(), self.first_variance.copy()
        self.mean[:, LEVEL] = [np.mean(one[: self.season]) for one in self.series]
        self.outputs = np.zeros((2, len(self.series), self.season))
        for row in rows:
            self.networks[row].reset_lstm_states()
        past = []
        for period in range(self.lengths[rows].max()):
            own = rows[self.lengths[rows] > period]
            past.append((own, *self._step(own, period, [self.series[row][period] for row in own])))
        self._smooth(past)

    def forecast(self, rows, steps):
        """Return means and variances of the periods after `train`, once, [2, rows, steps]."""
        found = [self._step(rows, self.lengths[rows] + step)[0] for step in range(steps)]
        return np.stack(found, axis=-1)

    def _step(self, rows, period, values=None):
        """Predict a period of the series and, from ``values``, learn.

        Returns means and variances of the values, and the states, predicted and then updated.
        """
        mean = self.mean[rows] @ NEXT.T
        variance = NEXT @ self.variance[rows] @ NEXT.T
        phase = np.broadcast_to(self.phase[period % self.season], len(rows))
        inputs = np.insert(self.outputs[:, rows], 0, 0, axis=2).astype(np.float32)
        inputs[0, :, 0] = phase
        found = np.array(
            [_outputs(self.networks[row], *inputs[:, i]) for i, row in enumerate(rows)]
        ).transpose(1, 2, 0)
        (mean[:, SEASONAL], log_noise), (variance[:, SEASONAL, SEASONAL], spread) = found
        noise = np.exp(np.clip(log_noise + spread / 2, -20, 20))  # the mean of the exponential
        spread = np.minimum(spread, 20)
        variance[:, NOISE, NOISE] = noise
        seen = mean @ SEEN, np.einsum("i,kij,j->k", SEEN, variance, SEEN)
        predicted = mean.copy(), variance.copy()
        if values is not None:
            gain = variance @ SEEN / seen[1][:, None]
            mean += gain * (values - seen[0])[:, None]
            variance -= seen[1][:, None, None] * gain[:, :, None] * gain[:, None, :]
            self._teach(rows, predicted, (mean, variance), spread)
        _add_what_stays(mean, variance)
        self.mean[rows], self.variance[rows] = mean, variance
        latest = np.stack([mean[:, SEASONAL], variance[:, SEASONAL, SEASONAL]])
        self.outputs[:, rows] = np.append(self.outputs[:, rows, 1:], latest[:, :, None], axis=2)
        return seen, predicted, (mean, variance)

    def _teach(self, rows, before, after, spread):
        """Train the networks by the change of their outputs.

        That of the noise's variance is by approximate Gaussian variance inference: B. Deka,
        J.-A. Goulet, International Journal of Adaptive Control and Signal Processing, 2023.
        """
        own, noise = before[1][:, SEASONAL, SEASONAL], before[1][:, NOISE, NOISE]
        change = after[0][:, SEASONAL] - before[0][:, SEASONAL]
        of_change = after[1][:, SEASONAL, SEASONAL] - own
        error, rest = after[0][:, NOISE], after[1][:, NOISE, NOISE]
        square, of_square = error**2 + rest, 2 * rest**2 + 4 * error**2 * rest
        # The variances of the square and of the exponential are in units of noise**2.
        of_expected = 3 * np.expm1(spread) + 2
        means = change / own, (square / noise - 1) / of_expected
        of_log_noise = (of_square / noise**2 / of_expected - 1) / of_expected
        variances = of_change / own**2, of_log_noise
        deltas = np.transpose([means, variances], (2, 0, 1)).astype(np.float32)
        for row, delta in zip(rows, deltas, strict=True):
            network = self.networks[row]
            network.set_delta_z(*delta)
            network.backward()
            network.step()

    def _smooth(self, past):
        """Begin the next pass with what the whole series says of its first period."""
        mean, variance = self.mean.copy(), self.variance.copy()
        for (later, _, predicted, _), (rows, _, _, updated) in zip(
            past[:0:-1], past[-2::-1], strict=True
        ):
            at = np.searchsorted(rows, later)
            gain = updated[1][at] @ NEXT.T @ np.linalg.inv(predicted[1] + 1e-12 * np.eye(7))
            change = mean[later] - predicted[0], variance[later] - predicted[1]
            mean[rows], variance[rows] = updated
            mean[later] += np.einsum("kij,kj->ki", gain, change[0])
            variance[later] += gain @ change[1] @ gain.transpose(0, 2, 1)
        self.first_mean = np.where(np.isin(STATES, (TREND, SHARE)), mean, 0)
        self.first_variance = variance * np.eye(7)


def _outputs(network, *inputs):
    """Return a network's outputs; if they grow without bound, it forgets its states."""
    if not np.abs(found := np.array(network.forward(*inputs), float)).max() < LARGEST:
        network.reset_lstm_states()
        found = np.array(network.forward(*inputs), float)
    return found


def _add_what_stays(mean, variance):
    """Write the moments of sigmoid(SHARE) * NOISE, by its linearisation, to the state STAYS."""
    share = 0.5 + 0.5 * np.tanh(mean[:, SHARE] / 2)
    with_share = (share * (1 - share))[:, None] * variance[:, SHARE]
    of_share = share * (1 - share) * with_share[:, SHARE]
    error, rest, both = mean[:, NOISE], variance[:, NOISE, NOISE], with_share[:, NOISE]
    mean[:, STAYS] = share * error + both
    row = with_share * error[:, None] + share[:, None] * variance[:, NOISE]
    row[:, STAYS] = (
        of_share * (rest + error**2) + share**2 * rest + both**2 + 2 * both * share * error
    )
    variance[:, STAYS] = variance[:, :, STAYS] = row
