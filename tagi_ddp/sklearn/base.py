"""The common base of `TAGIRegressor` and `TAGIClassifier`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from tagi_ddp.checks import integer
from tagi_ddp.engine.threads import new_lock, one_at_a_time
from tagi_ddp.sequential import accelerate
from tagi_ddp.sklearn.likelihoods import Likelihood
from tagi_ddp.sklearn.scaling import Moments, refuse_masked, require_near, scale_of
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
    _seen: dict[str, Moments] | None = None  # of x and y, if `partial_fit` came without `fit`
    _noise: float | None = None  # the setting of the first `partial_fit`

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
    def _likelihood(self, deviation: float | None) -> Likelihood:
        """Return what the outputs mean, in the targets' scaled units; ``deviation``: the noise."""

    @property
    def _deviation(self) -> float | None:
        """The noise, checked."""
        if self.noise is not None and not 0 < self.noise < np.inf:
            raise ValueError(f"noise must be a positive number or None, got {self.noise!r}")
        return None if self.noise is None else float(self.noise)

    @contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """Take back all attributes that were set, also by scikit-learn, where fitting fails.

        And the draws from a generator of others: ``random_state``, or numpy's if that is None.
        """
        before, generator = dict(vars(self)), self.random_state
        if generator is None:
            generator = check_random_state(None)
        drawn = generator.get_state() if isinstance(generator, np.random.RandomState) else None
        try:
            yield
        except BaseException:
            self.__dict__ = before
            if drawn is not None:
                generator.set_state(drawn)
            raise

    def _train(self, x: Array, targets: Array) -> None:
        """Train a new network on scaled samples."""
        self._network, schedule = self._new_network(), self._schedule(len(x))
        ranks = integer("n_ranks", self.n_ranks, 1)
        self._seen = None
        self.x_mean_, self.x_scale_ = x.mean(axis=0), scale_of(x)
        self._model, trained = train(self._network, schedule, self._scaled(x), targets, ranks)
        self.n_iter_ = trained.epochs
        self.validation_scores_ = list(trained.held_out)

    def _begin(self, features: int) -> None:
        """Begin with a network that knows nothing, and scales that do not either."""
        self._seen = {}
        self._noise = self._deviation
        self._network = self._new_network()
        self.x_mean_, self.x_scale_ = np.zeros(features), np.ones(features)
        self._model = accelerate(self._network.build())
        self.n_iter_ = 0

    def _learn(self, x: Array, targets: Array) -> None:
        """Learn samples once, by the network that there is, or none of them."""
        size = integer("batch_size", self.batch_size, 1)
        model = self._fitted()
        state = copy.deepcopy(model.run_state())  # which shows the model's own memory
        try:
            learn(model, self._network.likelihood, self._batches(x, targets, size))
        except BaseException:
            model.load_run_state(lambda _, name: state[name], 1)
            raise
        self.n_iter_ += 1

    def _batches(self, x: Array, targets: Array, size: int) -> Iterator[tuple[Array | None, ...]]:
        """Yield the arguments of `learn` for each batch, scaled by what was seen until then.

        So it does not matter to a stream how many batches a call has. After `fit` nothing is seen.
        """
        rows = len(x) if self._seen is None else size
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            self._see("x", x[part])
            observed = self._observed(targets[part])
            samples = {"mu_x": self._scaled(x[part]), **observed}
            yield from batches_of(self._fitted().communicator, size, samples)

    def _observed(self, targets: Array) -> dict[str, Array]:
        """Return the arguments of `learn` that are made of the targets."""
        return self._network.likelihood.observe(targets)

    def _see(self, name: str, rows: Array) -> None:
        """Scale by all rows of ``name``, "x" or "y", so far; after `fit`, refuse other units."""
        argument = "X" if name == "x" else name
        if self._seen is None:
            mean, scale = getattr(self, f"{name}_mean_"), getattr(self, f"{name}_scale_")
            require_near(argument, (rows - mean) / scale)
            return
        if (before := self._seen.get(name)) is None:
            moments = Moments.of(rows)
        else:
            before.refuse_alien(argument, rows)
            moments = before.with_rows(rows)
        self._seen = {**self._seen, name: moments}
        setattr(self, f"{name}_mean_", moments.mean)
        setattr(self, f"{name}_scale_", moments.scale)

    def _predicted(self, X: ArrayLike) -> Any:
        """Return what the likelihood predicts from the outputs, in scaled units."""
        check_is_fitted(self)
        refuse_masked(X=X)
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
        likelihood = self._likelihood(self._deviation)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        return Network(self.n_features_in_, hidden, self.activation, likelihood, seed)

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
