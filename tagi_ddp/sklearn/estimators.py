"""`TAGIRegressor` and `TAGIClassifier`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from tagi_ddp.checks import integer
from tagi_ddp.engine.threads import new_lock, one_at_a_time
from tagi_ddp.sequential import accelerate
from tagi_ddp.sklearn.likelihoods import Classes, Likelihood, Normal
from tagi_ddp.sklearn.training import (
    ACTIVATIONS,
    Network,
    Posterior,
    Schedule,
    batches_of,
    learn,
    outputs_of,
    posterior_of,
    train,
)

E = TypeVar("E", bound="TAGIEstimator")
Array = NDArray[Any]


class TAGIEstimator(BaseEstimator):  # type: ignore[misc]
    """A network of linear layers; what `TAGIRegressor` and `TAGIClassifier` have in common.

    A fitted network keeps its settings: what `set_params` changes of them counts from the next
    `fit`. A `fit` or `partial_fit` that fails leaves the estimator as it was. Several threads may
    use one estimator: their calls run one after the other.

    Parameters:
        hidden_layer_sizes: the widths of the hidden layers.
        activation: between the layers: "relu", "mixture_relu", "tanh" or "sigmoid".
        noise: of a regression, the standard deviation of what the inputs do not tell, in the
            targets' units; None: it is learned for each input, beside the value (AGVI). Of a
            classification, that of the noise of each binary decision, which is observed as 1 or
            -1; None: 1.
        max_iter: the number of epochs, or the most of them.
        batch_size: samples of a step.
        early_stopping: whether to hold out ``validation_fraction`` of the samples, to stop when
            their mean log-likelihood has not grown by more than ``tol`` for ``n_iter_no_change``
            epochs, and to keep the best epoch's network.
        n_ranks: how many processes of this host train together in `fit`, each on its part of each
            batch, with the result of one, up to rounding where torch computes. It pays for large
            networks.
        random_state: of the initial weights, the order of the samples and those held out.

    Attributes:
        posterior_: by layer, means and variances of weights and biases.
        n_iter_: how many epochs there were, and calls of `partial_fit`.
        validation_scores_: the held-out log-likelihood after each epoch of `fit`.
    """

    n_features_in_: int

    _network: Network  # what has been fitted, whatever the settings are by now
    _model: Any = None  # of that network; made again where it is missing

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (50,),
        *,
        activation: str = "relu",
        noise: float | None = None,
        max_iter: int = 100,
        batch_size: int = 10,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        tol: float = 0.01,
        n_ranks: int = 1,
        random_state: Any = None,
    ) -> None:
        """Take the settings; `fit` checks them."""
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.noise = noise
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.n_ranks = n_ranks
        self.random_state = random_state

    @property
    @one_at_a_time
    def posterior_(self) -> Posterior:
        """By layer: means and variances of the weights, and of the biases, flat float32 arrays."""
        check_is_fitted(self)
        return posterior_of(self._fitted())

    @one_at_a_time
    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled and copied: parameters as arrays, not the network."""
        state = dict(super().__getstate__())
        state.pop("_lock", None)
        if state.pop("_model", None) is not None:
            state["_posterior"] = self.posterior_
        return state

    # --- for the estimators -------------------------------------------------------------------

    @property
    def _calls(self) -> AbstractContextManager[Any]:
        """The lock of this estimator's methods; scikit-learn forbids to make it in __init__."""
        lock: AbstractContextManager[Any] = self.__dict__.setdefault("_lock", new_lock())
        return lock

    @abstractmethod
    def _likelihood(self) -> Likelihood:
        """Return what the outputs mean, in the targets' scaled units."""

    @property
    def _deviation(self) -> float | None:
        """The noise, checked."""
        if self.noise is not None and not 0 < self.noise < np.inf:
            raise ValueError(f"noise must be a positive number or None, got {self.noise!r}")
        return None if self.noise is None else float(self.noise)

    @contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """Take back all attributes that were set, also by scikit-learn, where fitting fails."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__ = before
            raise

    def _train(self, x: Array, targets: Array) -> None:
        """Train a new network on scaled samples."""
        self._network, schedule = self._new_network(), self._schedule(len(x))
        ranks = integer("n_ranks", self.n_ranks, 1)
        self.x_mean_, self.x_scale_ = x.mean(axis=0), _scale_of(x)
        self._model, trained = train(self._network, schedule, self._scaled(x), targets, ranks)
        self.n_iter_ = trained.epochs
        self.validation_scores_ = list(trained.held_out)

    def _begin(self, features: int) -> None:
        """Begin with a network that knows nothing, and samples as they are."""
        self._network = self._new_network()
        self.x_mean_, self.x_scale_ = np.zeros(features), np.ones(features)
        self._model = accelerate(self._network.build())
        self.n_iter_ = 0

    def _learn(self, x: Array, targets: Array) -> None:
        """Learn samples once, by the network that there is."""
        likelihood = self._network.likelihood
        samples = {"mu_x": self._scaled(x), **likelihood.observe(targets)}
        size = integer("batch_size", self.batch_size, 1)
        model = self._fitted()
        learn(model, likelihood, batches_of(model.communicator, size, samples))
        self.n_iter_ += 1

    def _predicted(self, X: ArrayLike) -> Any:
        """Return what the likelihood predicts from the outputs, in scaled units."""
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype=np.float64)
        return self._network.likelihood.predict(*outputs_of(self._fitted(), self._scaled(x)))

    def _fitted(self) -> Any:
        if self._model is None:
            self._model = accelerate(self._network.build(self._posterior))
            del self._posterior
        return self._model

    def _new_network(self) -> Network:
        """Return the network that the settings describe, with a seed of its own."""
        sizes = self.hidden_layer_sizes
        if isinstance(sizes, int | np.integer):
            sizes = [int(sizes)]
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )
        hidden = tuple(integer("hidden_layer_sizes", size, 1) for size in sizes)
        if not hidden:
            raise ValueError("hidden_layer_sizes must name a hidden layer or more, got none")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return Network(self.n_features_in_, hidden, self.activation, self._likelihood(), seed)

    def _schedule(self, samples: int) -> Schedule:
        epochs = integer("max_iter", self.max_iter, 1)
        size = integer("batch_size", self.batch_size, 1)
        if not self.early_stopping:
            return Schedule(epochs, size)
        share = self.validation_fraction
        held = max(1, round(samples * share)) if 0 < share < 1 else 0
        if not 0 < held < samples:
            raise ValueError(
                f"validation_fraction must be between 0 and 1 and leave a sample to train on, got "
                f"{share!r} with n_samples = {samples}"
            )
        patience = integer("n_iter_no_change", self.n_iter_no_change, 1)
        return Schedule(epochs, size, patience, held, float(self.tol))

    def _scaled(self, x: Array) -> Array:
        return np.ascontiguousarray((x - self.x_mean_) / self.x_scale_, np.float32)


class TAGIRegressor(RegressorMixin, TAGIEstimator):  # type: ignore[misc]
    """Regression with a Gaussian for every weight, and a deviation for every prediction.

    Inputs and targets are standardized by the samples of `fit`; `partial_fit` alone takes them as
    they are. Parameters and attributes: `TAGIEstimator`.
    """

    @one_at_a_time
    def fit(self, X: ArrayLike, y: ArrayLike) -> TAGIRegressor:
        """Train a new network.

        Args:
            X: [samples, features]. y: [samples] or [samples, targets].
        """
        with self._unchanged_by_errors():
            x, targets = self._validated(X, y, reset=True)
            self.y_mean_, self.y_scale_ = targets.mean(axis=0), _scale_of(targets)
            self._train(x, (targets - self.y_mean_) / self.y_scale_)
        return self

    @one_at_a_time
    def partial_fit(self, X: ArrayLike, y: ArrayLike) -> TAGIRegressor:
        """Learn these samples once, in their order: one observation, or a part of a stream.

        After `fit` they are scaled as there. Without it nothing is: let targets, and inputs, be
        about as large as 1. One process learns them, whatever ``n_ranks`` is.
        """
        begins = not hasattr(self, "y_mean_")
        with self._unchanged_by_errors():
            x, targets = self._validated(X, y, reset=begins)
            if begins:
                self.y_mean_, self.y_scale_ = np.zeros(targets.shape[1]), np.ones(targets.shape[1])
                self._begin(x.shape[1])
            self._learn(x, (targets - self.y_mean_) / self.y_scale_)
        return self

    @one_at_a_time
    def predict(self, X: ArrayLike, return_std: bool = False) -> Array | tuple[Array, Array]:
        """Return the means of the predictions, and their standard deviations.

        These hold what the network does not know and the noise, like GaussianProcessRegressor's
        with a WhiteKernel. Both have the shape of the targets of `fit`.
        """
        mean, variance = self._predicted(X)
        mean = mean * self.y_scale_ + self.y_mean_
        deviation = np.sqrt(variance) * self.y_scale_
        if self._flat:
            mean, deviation = mean[:, 0], deviation[:, 0]
        return (mean, deviation) if return_std else mean

    def _validated(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Array, Array]:
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

    def _likelihood(self) -> Normal:
        if (deviation := self._deviation) is None:
            return Normal(len(self.y_mean_), None)
        return Normal(len(self.y_mean_), tuple((deviation / self.y_scale_).tolist()))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class TAGIClassifier(ClassifierMixin, TAGIEstimator):  # type: ignore[misc]
    """Classification with a Gaussian for every weight, by hierarchical softmax.

    Inputs are standardized by the samples of `fit`; `partial_fit` alone takes them as they are.
    Parameters and attributes: `TAGIEstimator`.
    """

    @one_at_a_time
    def fit(self, X: ArrayLike, y: ArrayLike) -> TAGIClassifier:
        """Train a new network.

        Args:
            X: [samples, features]. y: [samples], labels of two classes or more.
        """
        with self._unchanged_by_errors():
            x, labels = self._validated(X, y, reset=True)
            self._know(np.unique(labels))
            self._train(x, self._numbers(labels))
        return self

    @one_at_a_time
    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, classes: ArrayLike | None = None
    ) -> TAGIClassifier:
        """Learn these samples once, in their order: one observation, or a part of a stream.

        The first call, unless `fit` came before, needs all ``classes``. After `fit` inputs are
        scaled as there; without it, let them be about as large as 1. One process learns, whatever
        ``n_ranks`` is.
        """
        begins = not hasattr(self, "classes_")
        if begins and classes is None:
            raise ValueError("classes must be given in the first call of partial_fit")
        with self._unchanged_by_errors():
            x, labels = self._validated(X, y, reset=begins)
            if begins:
                self._know(np.unique(np.asarray(classes)))
                self._begin(x.shape[1])
            elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
                raise ValueError(f"classes must be those of before, {self.classes_}, got {classes}")
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

    def _validated(self, X: ArrayLike, y: ArrayLike, reset: bool) -> tuple[Array, Array]:
        x, labels = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(labels)
        return x, labels

    def _know(self, classes: Array) -> None:
        if len(classes) < 2:
            raise ValueError(f"y must have 2 classes or more, got 1 class: {classes[0]!r}")
        self.classes_ = classes

    def _numbers(self, labels: Array) -> Array:
        numbers = np.minimum(np.searchsorted(self.classes_, labels), len(self.classes_) - 1)
        if (unknown := np.unique(labels[self.classes_[numbers] != labels])).size:
            raise ValueError(f"y has labels {unknown}, which are not among {self.classes_}")
        return numbers[:, None]

    def _likelihood(self) -> Classes:
        return Classes(len(self.classes_), self._deviation or 1.0)


def _scale_of(values: Array) -> Array:
    """Return standard deviations by column, 1 where all values are the same."""
    deviation = values.std(axis=0)
    return np.where(deviation > 10 * np.finfo(float).eps * np.abs(values).max(axis=0), deviation, 1)
