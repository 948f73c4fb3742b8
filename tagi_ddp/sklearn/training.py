"""Construction and training of an estimator's networks, by one process or several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.communicators import Communicator
from tagi_ddp.data import share_of
from tagi_ddp.engine.locks import engine_generator
from tagi_ddp.launcher.launch import launch
from tagi_ddp.sequential import DDPConfig, DDPSequential, accelerate
from tagi_ddp.sklearn.likelihoods import Likelihood, begin_noise_even
from tagi_ddp.update.not_finite import NotFiniteError

Array = NDArray[Any]
Log = Callable[[Mapping[str, float], int], None]
Posterior = dict[str, tuple[Array, ...]]  # by layer: means and variances, weights and biases

# Kernels round differently in smaller batches, but a prediction must not depend on other samples.
_ROWS = 8
ACTIVATIONS = {
    "relu": "ReLU",
    "mixture_relu": "MixtureReLU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}


@dataclass(frozen=True)
class Network:
    """Linear layers of these widths with an activation between, and the outputs' likelihood."""

    inputs: int
    hidden: tuple[int, ...]
    activation: str
    likelihood: Likelihood
    seed: int

    def build(self, posterior: Posterior | None = None) -> Any:
        """Return pytagi's Sequential, with these parameters or with ones drawn from the seed."""
        import pytagi
        from pytagi import nn

        layers: list[Any] = []
        width = self.inputs
        with engine_generator:
            pytagi.manual_seed(self.seed)
            for hidden in self.hidden:
                layers += [nn.Linear(width, hidden), getattr(nn, ACTIVATIONS[self.activation])()]
                width = hidden
            layers.append(nn.Linear(width, self.likelihood.outputs))
        if self.likelihood.learns_noise:
            layers.append(nn.EvenExp())
        network = nn.Sequential(*layers)
        if posterior is not None:
            load(network, posterior)
        elif self.likelihood.learns_noise:
            begin_noise_even(network, self.likelihood)
        return network


@dataclass(frozen=True)
class Schedule:
    """The length of a training.

    Training stops after ``patience`` epochs in turn without a gain of more than ``tolerance`` in
    the log-likelihood of left-out samples; None: it has all epochs, and the last network is kept.
    """

    epochs: int
    batch_size: int
    patience: int | None = None
    tolerance: float = 0.0


@dataclass(frozen=True)
class Trained:
    """Trained networks: the posteriors of the best epoch, and the number of epochs."""

    posteriors: list[Posterior]
    epochs: int
    scores: list[float]  # mean log-likelihood of the left-out samples after each epoch


def train(
    networks: Sequence[Network],
    left_out: Sequence[Array],
    schedule: Schedule,
    x: Array,
    y: Array,
    ranks: int,
    timeout: float,
    log: Log,
) -> tuple[list[DDPSequential], Trained]:
    """Train new networks for the same epochs, each on all samples but those that it leaves out.

    Several ranks train each network together, each rank on its part of each batch. A wait for
    another rank takes at most ``timeout`` seconds. ``log`` is called with the metrics of each
    epoch; if there are several ranks, at the end.
    """
    arguments = networks, left_out, schedule, x, y
    if ranks > 1:
        trained = launch(_train_rank, nprocs=ranks, args=(timeout, *arguments))[0]
        for epoch in range(1, trained.epochs + 1):
            log(_metrics(epoch, trained.scores), epoch)
        models = [accelerate(network.build()) for network in networks]
    else:
        models = [accelerate(network.build()) for network in networks]
        trained = _train(log, models, *arguments)
    for model, posterior in zip(models, trained.posteriors, strict=True):
        load(model, posterior)  # The best epoch may not be the last one.
    return models, trained


def _train_rank(timeout: float, networks: Sequence[Network], *arguments: Any) -> Trained:
    config = DDPConfig.from_env(timeout=timeout)
    with ExitStack() as stack:
        models = [
            stack.enter_context(DDPSequential(network.build(), config, average=False))
            for network in networks
        ]
        return _train(lambda metrics, epoch: None, models, networks, *arguments)


def _metrics(epoch: int, scores: Sequence[float]) -> dict[str, float]:
    metrics = {"epoch": float(epoch)}
    return {**metrics, "validation_score": scores[epoch - 1]} if scores else metrics


def _train(
    log: Log,
    models: Sequence[Any],
    networks: Sequence[Network],
    left_out: Sequence[Array],
    schedule: Schedule,
    x: Array,
    y: Array,
) -> Trained:
    likelihood, scores = networks[0].likelihood, list[float]()
    trainings = []
    for model, network, rows in zip(models, networks, left_out, strict=True):
        kept = np.delete(np.arange(len(x)), rows)
        trainings.append(_epochs(model, network, schedule.batch_size, x[kept], y[kept]))
    best, waited, posteriors = -np.inf, 0, [posterior_of(model) for model in models]
    for epoch in range(1, schedule.epochs + 1):
        for training in trainings:
            next(training)
        if schedule.patience is None:
            log(_metrics(epoch, scores), epoch)
            continue
        logs = [
            likelihood.log(likelihood.predict(*outputs_of(model, x[rows])), y[rows])
            for model, rows in zip(models, left_out, strict=True)
        ]
        scores.append(float(np.concatenate(logs).mean()))
        log(_metrics(epoch, scores), epoch)
        waited += 1
        if scores[-1] > best + schedule.tolerance:
            best, waited, posteriors = scores[-1], 0, [posterior_of(model) for model in models]
        if waited >= schedule.patience:
            break
    if schedule.patience is None:
        posteriors = [posterior_of(model) for model in models]
    return Trained(posteriors, len(scores) or schedule.epochs, scores)


def _epochs(model: Any, network: Network, size: int, x: Array, y: Array) -> Iterator[None]:
    """Train a network by one epoch, in its own order of samples, for each ``next``."""
    rng = np.random.default_rng(network.seed)
    ordered = {"mu_x": x, **network.likelihood.observe(y)}
    shuffled = {name: np.empty_like(rows) for name, rows in ordered.items()}
    batches = batches_of(model.communicator, size, shuffled)
    while True:
        order = rng.permutation(len(x))
        for name, rows in ordered.items():
            np.take(rows, order, axis=0, out=shuffled[name], mode="clip")
        learn(model, network.likelihood, batches)
        yield


def batches_of(
    communicator: Communicator, size: int, samples: dict[str, Array]
) -> list[tuple[Array | None, ...]]:
    """Return the rank's part of each batch, in order: the arguments of `learn`, as views."""
    rank, ranks = communicator.rank, communicator.size
    count = len(samples["mu_x"])
    own = []
    for begin in range(0, count, size):
        share = share_of(min(size, count - begin), rank, ranks)
        own.append(slice(begin + share.start, begin + share.stop))
    arguments = [samples.get(name) for name in ("mu_x", "mu_obs", "var_obs", "selected_idx")]
    return [tuple(None if rows is None else rows[part] for rows in arguments) for part in own]


def learn(model: Any, likelihood: Likelihood, batches: Iterable[tuple[Array | None, ...]]) -> None:
    """Learn all batches once; raise ValueError if the network can learn none of them."""
    # A noise that is predicted as zero or infinite leaves nothing to learn from.
    ignored = (NotFiniteError,) if likelihood.learns_noise else ()
    step, learned, refused = model.learn, 0, None
    for batch in batches:
        try:
            step(*batch)
        except ignored as error:
            refused = error
        else:
            learned += 1
    if refused is not None and not learned:
        raise ValueError(
            "no batch could be learned, as the noise predicted for each is zero or infinite: look "
            "for samples far from all others, or set noise"
        ) from refused


def outputs_of(model: Any, x: Array) -> tuple[Array, Array]:
    """Return means and variances of all outputs, flat; leave the model in training mode."""
    rows = max(len(x), _ROWS)
    try:
        model.eval()
        mean, variance = model(np.resize(x, (rows, *x.shape[1:])))
    finally:  # This also follows a KeyboardInterrupt.
        model.train()
    values = len(mean) // rows * len(x)
    return mean[:values], variance[:values]


def load(model: Any, posterior: Posterior) -> None:
    """Replace the model's parameters by ``posterior``."""
    model.load_state_dict(
        {name: tuple(map(np.ndarray.tolist, parts)) for name, parts in posterior.items()}
    )


def posterior_of(model: Any) -> Posterior:
    """Return a copy of a model's parameters."""
    return {
        name: tuple(np.array(part, np.float32) for part in parts)
        for name, parts in model.state_dict().items()
    }
