"""`TAGIRegressor` and `TAGIClassifier`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from tagi_ddp.data.trackers import Tracker
from tagi_ddp.engine.locks import one_at_a_time
from tagi_ddp.sklearn.base import TAGIEstimator
from tagi_ddp.sklearn.likelihoods import Classes, Normal
from tagi_ddp.sklearn.scaling import Moments, refuse_masked

Array = NDArray[Any]


class TAGIRegressor(RegressorMixin, TAGIEstimator):  # type: ignore[misc]
    """Regression with a Gaussian for every weight, and a standard deviation for every prediction.

    `fit` trains ``n_networks`` networks, each without one part of the samples, and predicts by all
    of them together with a linear model, `sklearn.linear_model.BayesianRidge`. The networks and the
    linear model are weighted to make the left-out targets most likely, so the deviations fit
    samples that no network has seen. Inputs and targets are standardized by the samples of `fit`,
    or by all those of `partial_fit` so far.

    Parameters:
        hidden_layer_sizes: the widths of the hidden layers; a number is one layer.
        activation: that of the hidden layers: "relu", "mixture_relu", "tanh" or "sigmoid".
        noise: the standard deviation of the targets' noise, in their unit; None: it is learned as
            a function of the input (AGVI).
        max_iter: the largest number of epochs.
        batch_size: the number of samples of a step.
        n_networks: the number of networks; 1: a single one without a linear model.
        early_stopping: whether to stop when the left-out samples are no longer predicted better,
            and to keep the networks of the best epoch.
        validation_fraction: the part of the samples that a single network leaves out, if
            ``early_stopping``; with several networks it is not used.
        n_iter_no_change: the number of epochs in turn without a gain after which training stops.
        tol: the least gain of the mean log-likelihood of the left-out samples.
        n_ranks: the number of processes of this host that train together in `fit`, each on its part
            of each batch. The result is that of one process, up to rounding.
            It is faster for large networks only.
        timeout: the seconds for which one of these processes waits for another.
        random_state: the seed or generator for initial weights, sample order, and parts left out.

    Attributes:
        posteriors_: for each network, by layer, the means and variances of weights and biases.
        posterior_: the same for the network, if there is only one.
        n_iter_: the number of epochs plus the number of calls of `partial_fit`.
        validation_scores_: the mean log-likelihood of the left-out targets, which are standardized
            in a regression, after each epoch of `fit`.
    """

    y_mean_: Array
    y_scale_: Array

    @one_at_a_time
    def fit(self, X: ArrayLike, y: ArrayLike, *, trackers: Sequence[Tracker] = ()) -> TAGIRegressor:
        """Train a new network.

        Args:
            X: [samples, features]. y: [samples] or [samples, targets].
            trackers: get each epoch's number and "validation_score", see `validation_scores_`; with
                ``n_ranks`` above 1 all at the end.
        """
        with self._unchanged_by_errors():
            x, targets = self._validated(X, y, reset=True)
            moments = Moments.of(targets)
            self.y_mean_, self.y_scale_ = moments.mean, moments.scale
            self._train(x, (targets - self.y_mean_) / self.y_scale_, trackers)
        return self

    @one_at_a_time
    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> TAGIRegressor:
        """Learn these samples once, in their order: one observation, or a part of a stream.

        After `fit` the scales of `fit` are used. Without it, samples are scaled by all samples so
        far, including these. One process learns them, whatever ``n_ranks`` is.

        Raises ValueError, with nothing learned, for samples in other units than those of `fit`, or
        if the network can learn none of them.
        """
        begins = not hasattr(self, "y_mean_")
        with self._unchanged_by_errors():
            x, targets = self._validated(X, y, reset=begins)
            if begins:
                self.y_mean_, self.y_scale_ = np.zeros(targets.shape[1]), np.ones(targets.shape[1])
                self._begin(x.shape[1])
            self._learn(x, targets)
        return self

    @one_at_a_time
    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return the means of the predictions; with ``return_std``, also their standard deviations.

        A deviation is that of a new observation: it includes the uncertainty of the networks, their
        disagreement, and the noise, like that of GaussianProcessRegressor with a WhiteKernel. The
        targets are assumed to be normally distributed around the mean: 90 % of them are expected
        within 1.645 deviations, 95 % within 1.96. The arrays have the shape of `fit`'s targets.
        """
        mean, variance = self._predicted(X)
        mean = mean * self.y_scale_ + self.y_mean_
        deviation = np.sqrt(variance) * self.y_scale_
        if self._flat:
            mean, deviation = mean[:, 0], deviation[:, 0]
        return (mean, deviation) if return_std else mean

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the coefficient of determination, R2, of the predicted means."""
        refuse_masked(y=y, sample_weight=sample_weight)
        return float(super().score(X, y, sample_weight))

    def _validated(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Array, Array]:
        refuse_masked(X=X, y=y)
        x, targets = validate_data(
            self, X, y, reset=reset, dtype=np.float64, multi_output=True, y_numeric=True
        )
        targets = np.asarray(targets, np.float64)
        if reset:
            self._flat = targets.ndim == 1
        targets = targets.reshape(len(x), -1)
        if not reset and targets.shape[1] != len(self.y_mean_):
            raise ValueError(f"y has {targets.shape[1]} targets, expected {len(self.y_mean_)}")
        return x, targets

    def _observed(self, targets: Array) -> dict[str, Array]:
        self._see("y", targets)
        if self._seen is not None:  # The noise has changed in the current scaled units.
            likelihood = self._likelihood(self._noise)
            self._networks = [replace(self._networks[0], likelihood=likelihood)]
        return super()._observed((targets - self.y_mean_) / self.y_scale_)

    def _likelihood(self, deviation: float | None) -> Normal:
        if deviation is None:
            return Normal(len(self.y_mean_), None)
        return Normal(len(self.y_mean_), tuple((deviation / self.y_scale_).tolist()))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class TAGIClassifier(ClassifierMixin, TAGIEstimator):  # type: ignore[misc]
    """Classification with a Gaussian for every weight, by hierarchical softmax.

    `fit` trains ``n_networks`` networks, each without one part of the samples, and predicts by all
    of them together with a linear model, `sklearn.linear_model.LogisticRegression`. The networks
    and the linear model are weighted to make the left-out labels most likely. Inputs are
    standardized by the samples of `fit`, or by all those of `partial_fit` so far.

    Parameters:
        noise: the standard deviation of the noise of each binary decision, which is observed as 1
            or -1; None means 1.

    Attributes:
        classes_: the labels, in the order of `predict_proba`.

    The other parameters and attributes are those of `TAGIRegressor`.
    """

    @one_at_a_time
    def fit(
        self, X: ArrayLike, y: ArrayLike, *, trackers: Sequence[Tracker] = ()
    ) -> TAGIClassifier:
        """Train a new network.

        Args:
            X: [samples, features]. y: [samples], labels of two classes or more.
            trackers: see `TAGIRegressor.fit`.
        """
        with self._unchanged_by_errors():
            x, labels = self._validated(X, y, reset=True)
            self._set_classes(np.unique(labels))
            self._train(x, self._numbers(labels), trackers, stratify=True)
        return self

    @one_at_a_time
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None
    ) -> TAGIClassifier:
        """Learn these samples once, in their order: one observation, or a part of a stream.

        Without an earlier `fit`, the first call needs all ``classes``. After `fit` its scales are
        used. Without it, inputs are scaled by all samples so far, including these. One process
        learns them, whatever ``n_ranks`` is.

        Raises ValueError, with nothing learned, for inputs in other units than those of `fit`.
        """
        begins = not hasattr(self, "classes_")
        if begins and classes is None:
            raise ValueError("classes must be given in the first call of partial_fit")
        with self._unchanged_by_errors():
            x, labels = self._validated(X, y, reset=begins)
            if begins:
                self._set_classes(np.unique(np.asarray(classes)))
                self._begin(x.shape[1])
            elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
                raise ValueError(f"classes must be {self.classes_}, as before, got {classes}")
            self._learn(x, self._numbers(labels))
        return self

    @one_at_a_time
    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probabilities of ``classes_``, [samples, classes]."""
        return np.asarray(self._predicted(X))

    @one_at_a_time
    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable label of each sample."""
        numbers = self.predict_proba(X).argmax(axis=1)
        return np.asarray(self.classes_[numbers])

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the share of labels that are predicted correctly."""
        refuse_masked(y=y, sample_weight=sample_weight)
        return float(super().score(X, y, sample_weight))

    def _validated(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Array, Array]:
        refuse_masked(X=X, y=y)
        x, labels = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(labels)
        return x, labels

    def _set_classes(self, classes: Array) -> None:
        if len(classes) < 2:
            raise ValueError(f"y must have 2 classes or more, got 1 class: {classes[0]!r}")
        self.classes_ = classes

    def _numbers(self, labels: Array) -> Array:
        numbers = np.minimum(np.searchsorted(self.classes_, labels), len(self.classes_) - 1)
        if (unknown := np.unique(labels[self.classes_[numbers] != labels])).size:
            raise ValueError(f"y has labels {unknown}, which are not among {self.classes_}")
        return numbers[:, None]

    def _likelihood(self, deviation: float | None) -> Classes:
        return Classes(len(self.classes_), deviation or 1.0)
