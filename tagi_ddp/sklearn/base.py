"""The common base of `TAGIRegressor` and `TAGIClassifier`."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from tagi_ddp.checks import integer, seconds
from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.data.trackers import Tracker, Tracking, check_trackers
from tagi_ddp.engine.locks import new_lock, one_at_a_time
from tagi_ddp.sequential import accelerate
from tagi_ddp.sklearn.likelihoods import Likelihood, Pool
from tagi_ddp.sklearn.scaling import Moments, refuse_masked, require_near
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
    """The common base of `TAGIRegressor` and `TAGIClassifier`, which describe its parameters.

    A fitted estimator keeps its settings: changes by `set_params` take effect at the next `fit`. A
    `fit` or `partial_fit` that fails leaves the estimator as it was. Several threads may use one
    estimator: their calls run one after the other.
    """

    n_features_in_: int
    n_iter_: int
    x_mean_: Array
    x_scale_: Array
    validation_scores_: list[float]

    _networks: list[Network]  # The fitted networks; the settings may have changed since.
    _models: list[Any] | None = None  # The models of `_networks`; None: to be built when needed.
    _pool: Pool | None = None  # The pool of several networks and a linear model.
    _seen: dict[str, Moments] | None = None  # for `partial_fit` without `fit`: moments of x and y
    _noise: float | None = None  # the setting of the first `partial_fit`

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (50, 50),
        *,
        activation: str = "relu",
        noise: float | None = None,
        max_iter: int = 200,
        batch_size: int = 10,
        n_networks: int = 5,
        early_stopping: bool = True,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        tol: float = 0.001,
        n_ranks: int = 1,
        timeout: float = DEFAULT_TIMEOUT,
        random_state: Any = None,
    ) -> None:
        """Store the settings; `fit` checks them."""
        self.hidden_layer_sizes = hidden_layer_sizes
        self.activation = activation
        self.noise = noise
        self.max_iter = max_iter
        self.batch_size = batch_size
        self.n_networks = n_networks
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.n_ranks = n_ranks
        self.timeout = timeout
        self.random_state = random_state

    @property
    @one_at_a_time
    def posteriors_(self) -> list[Posterior]:
        """The parameters of each network, by layer.

        They are means and variances of the weights and of the biases, flat float32 arrays.
        """
        check_is_fitted(self)
        return [posterior_of(model) for model in self._fitted()]

    @property
    def posterior_(self) -> Posterior:
        """The parameters of the network, if there is only one; else use `posteriors_`."""
        posteriors = self.posteriors_
        if len(posteriors) > 1:
            raise AttributeError(
                f"posterior_ is of one network, and n_networks has been {len(posteriors)}: use "
                "posteriors_"
            )
        return posteriors[0]

    @one_at_a_time
    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy: parameters as arrays, not the network."""
        state = dict(super().__getstate__())
        state.pop("_lock", None)
        if state.pop("_models", None) is not None:
            state["_posteriors"] = self.posteriors_
        return state

    # --- for the estimators -------------------------------------------------------------------

    @property
    def _calls(self) -> AbstractContextManager[Any]:
        """The lock of this estimator's methods; scikit-learn forbids creating it in __init__."""
        lock: AbstractContextManager[Any] = self.__dict__.setdefault("_lock", new_lock())
        return lock

    @abstractmethod
    def _likelihood(self, deviation: float | None) -> Likelihood:
        """Return the likelihood of targets in scaled units; ``deviation`` is that of the noise."""

    @property
    def _deviation(self) -> float | None:
        """The checked standard deviation of the noise."""
        if self.noise is not None and not 0 < self.noise < np.inf:
            raise ValueError(f"noise must be a positive number or None, got {self.noise!r}")
        return None if self.noise is None else float(self.noise)

    @contextmanager
    def _unchanged_by_errors(self) -> Iterator[None]:
        """Restore all attributes, also those that scikit-learn sets, if fitting fails.

        The state of the generator is restored too: ``random_state``, or numpy's if that is None.
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

    def _train(
        self, x: Array, targets: Array, trackers: Sequence[Tracker], stratify: bool = False
    ) -> None:
        """Train new networks on scaled samples."""
        ranks, schedule = integer("n_ranks", self.n_ranks, 1), self._schedule()
        timeout = seconds("timeout", self.timeout)
        check_trackers(trackers)
        network = self._new_network()
        parts = self._left_out(len(x), network.seed, targets if stratify else None)
        self._networks = [
            replace(network, seed=(network.seed + number) % 2**31) for number in range(len(parts))
        ]
        self._seen = None
        moments = Moments.of(x)
        self.x_mean_, self.x_scale_ = moments.mean, moments.scale
        x = self._scaled(x)
        arguments = self._networks, parts, schedule, x, targets, ranks, timeout
        tracking = Tracking(trackers, 0)
        with tracking.run(type(self).__name__, self.get_params()):
            self._models, trained = train(*arguments, tracking.log)
        self._pool = None
        if len(parts) > 1:
            networks = [partial(self._outputs, number) for number in range(len(parts))]
            self._pool = Pool.of(network.likelihood, networks, parts, x, targets)
        self.n_iter_, self.validation_scores_ = trained.epochs, trained.scores

    def _left_out(self, samples: int, seed: int, labels: Array | None) -> list[Array]:
        """Return the numbers of the samples that each network leaves out.

        With ``labels``, all parts have about the same number of samples of each label.
        """
        count = integer("n_networks", self.n_networks, 1)
        parts = min(count, samples // 2)  # A network needs a sample or more to train on.
        order = np.random.default_rng(seed).permutation(samples)
        if parts > 1:
            if labels is not None:
                order = order[np.argsort(labels[order, 0], kind="stable")]
            return [np.sort(order[number::parts]) for number in range(parts)]
        if not self.early_stopping:
            return [order[:0]]
        share = self.validation_fraction
        held = max(1, round(samples * share)) if 0 < share < 1 else 0
        if not 0 < held < samples:
            raise ValueError(
                f"validation_fraction must be between 0 and 1 and leave a sample to train on, got "
                f"{share!r} with n_samples = {samples}"
            )
        return [np.sort(order[:held])]

    def _begin(self, features: int) -> None:
        """Begin with an untrained network and without scales."""
        self._seen = {}
        self._noise = self._deviation
        self._networks, self._pool = [self._new_network()], None
        self.x_mean_, self.x_scale_ = np.zeros(features), np.ones(features)
        self._models = [accelerate(self._networks[0].build())]
        self.n_iter_ = 0

    def _learn(self, x: Array, targets: Array) -> None:
        """Make each network learn the samples once; after an error, none has learned any."""
        size = integer("batch_size", self.batch_size, 1)
        models = self._fitted()
        states = [copy.deepcopy(model.run_state()) for model in models]  # These are views.
        batches = list(self._batches(x, targets, size))
        try:
            for model in models:
                learn(model, self._networks[0].likelihood, batches)
        except BaseException:
            for model, state in zip(models, states, strict=True):
                model.load_run_state(lambda _, name, state=state: state[name], 1)
            raise
        self.n_iter_ += 1

    def _batches(self, x: Array, targets: Array, size: int) -> Iterator[tuple[Array | None, ...]]:
        """Yield the arguments of `learn` for each batch, scaled by all samples up to that batch.

        So the number of batches in a call does not matter. After `fit` the scales are fixed.
        """
        rows = len(x) if self._seen is None else size
        for begin in range(0, len(x), rows):
            part = slice(begin, begin + rows)
            self._see("x", x[part])
            observed = self._observed(targets[part])
            samples = {"mu_x": self._scaled(x[part]), **observed}
            yield from batches_of(self._fitted()[0].communicator, size, samples)

    def _observed(self, targets: Array) -> dict[str, Array]:
        """Return the arguments of `learn` that depend on the targets."""
        return self._networks[0].likelihood.observe(targets)

    def _see(self, name: str, rows: Array) -> None:
        """Add rows of ``name``, "x" or "y", to the scales; after `fit`, raise for other units."""
        argument = "X" if name == "x" else name
        if self._seen is None:
            mean, scale = getattr(self, f"{name}_mean_"), getattr(self, f"{name}_scale_")
            require_near(argument, (rows - mean) / scale)
            return
        if (before := self._seen.get(name)) is None:
            moments = Moments.of(rows)
        else:
            before.refuse_outliers(argument, rows)
            moments = before.with_rows(rows)
        self._seen = {**self._seen, name: moments}
        setattr(self, f"{name}_mean_", moments.mean)
        setattr(self, f"{name}_scale_", moments.scale)

    def _predicted(self, X: ArrayLike) -> Array:
        """Return the prediction of the targets, in scaled units."""
        check_is_fitted(self)
        refuse_masked(X=X)
        x = self._scaled(validate_data(self, X, reset=False, dtype=np.float64))
        outputs = [self._outputs(number, x) for number in range(len(self._networks))]
        return outputs[0] if self._pool is None else self._pool.predict(x, outputs)

    def _outputs(self, number: int, x: Array) -> Array:
        """Return the prediction of one network, in scaled units."""
        return self._networks[number].likelihood.predict(*outputs_of(self._fitted()[number], x))

    def _fitted(self) -> list[Any]:
        if self._models is None:
            self._models = [
                accelerate(network.build(posterior))
                for network, posterior in zip(self._networks, self._posteriors, strict=True)
            ]
            del self._posteriors
        return self._models

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

    def _schedule(self) -> Schedule:
        epochs = integer("max_iter", self.max_iter, 1)
        size = integer("batch_size", self.batch_size, 1)
        if not self.early_stopping:
            return Schedule(epochs, size)
        patience = integer("n_iter_no_change", self.n_iter_no_change, 1)
        return Schedule(epochs, size, patience, float(self.tol))

    def _scaled(self, x: Array) -> Array:
        return np.ascontiguousarray((x - self.x_mean_) / self.x_scale_, np.float32)
