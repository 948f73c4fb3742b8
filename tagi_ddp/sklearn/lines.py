"""Linear models, and the powers that pool their predictive densities with the networks'."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import BayesianRidge, LogisticRegression

Array = NDArray[Any]

# This is the prior standard deviation of the logarithm of the powers' sum. With it, a few left-out
# samples cannot make predictions much more or much less certain.
_PRIOR_DEVIATION = 0.5
_LEAST, _MOST = 1e-6, 1e2  # bounds of a power
_LEAST_PROBABILITY = 1e-6  # the least probability of a class


class StraightLine:
    """Bayesian ridge regression of each target."""

    def __init__(self, x: Array, targets: Array) -> None:
        x = x.astype(np.float64)  # In float32 the prediction of a row depends on its index.
        self._targets = [BayesianRidge().fit(x, column) for column in targets.T]

    def predict(self, x: Array) -> Array:
        """Return means and variances, [2, samples, targets]."""
        x = x.astype(np.float64)
        results = [target.predict(x, return_std=True) for target in self._targets]
        mean, deviation = np.moveaxis(np.array(results, np.float64), 0, -1)
        return np.stack([mean, np.square(deviation)])


class LogisticLine:
    """Logistic regression over ``count`` classes; ``labels``: [samples, 1], from 0."""

    def __init__(self, x: Array, labels: Array, count: int) -> None:
        self._count, self._seen = count, np.unique(labels)
        self._model = None
        if len(self._seen) > 1:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                self._model = LogisticRegression().fit(x.astype(np.float64), labels[:, 0])

    def predict(self, x: Array) -> Array:
        """Return the probabilities of the classes, [samples, classes]."""
        probabilities = np.full((len(x), self._count), _LEAST_PROBABILITY)
        fitted = 1.0 if self._model is None else self._model.predict_proba(x.astype(np.float64))
        probabilities[:, self._seen] = np.maximum(fitted, _LEAST_PROBABILITY)
        return np.asarray(probabilities / probabilities.sum(axis=1, keepdims=True))


def best_powers(log_likelihood: Callable[[Array], float]) -> Array:
    """Return the two powers that maximize a log-likelihood, which is concave in them."""

    def loss(powers: Array) -> float:
        prior = 0.5 * (np.log(powers.sum()) / _PRIOR_DEVIATION) ** 2
        return float(prior - log_likelihood(powers))

    result = minimize(loss, (0.5, 0.5), method="L-BFGS-B", bounds=[(_LEAST, _MOST)] * 2)
    return np.asarray(result.x)
