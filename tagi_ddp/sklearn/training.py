"""How an estimator's network is built and trained, by one process or by several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tagi_ddp.communicators import Communicator
from tagi_ddp.data import share_of
from tagi_ddp.engine.threads import engine_generator
from tagi_ddp.launcher.launch import launch
from tagi_ddp.sequential import DDPConfig, DDPSequential, accelerate
from tagi_ddp.sklearn.likelihoods import Likelihood, begin_noise_even
from tagi_ddp.update.not_finite import NotFiniteError

Array = NDArray[Any]
Posterior = dict[str, tuple[Array, ...]]  # by layer: means and variances, weights and biases

ACTIVATIONS = {
    "relu": "ReLU",
    "mixture_relu": "MixtureReLU",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}


@dataclass(frozen=True)
class Network:
    """Linear layers of these widths with an activation between; what its outputs mean."""

    inputs: int
    hidden: tuple[int, ...]
    activation: str
    likelihood: Likelihood
    seed: int

    def build(self, posterior: Posterior | None = None) -> Any:
        """Return pytagi's Sequential, with these parameters, or such as the seed gives."""
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
    """How long to train.

    ``patience``: for so many epochs in turn the log-likelihood of ``held_out`` samples may improve
    by less than ``tolerance``; None: all epochs, on all samples.
    """

    epochs: int
    batch_size: int
    patience: int | None = None
    held_out: int = 0
    tolerance: float = 0.0


@dataclass(frozen=True)
class Trained:
    """What training has led to: the posterior of the best epoch, and how many there were."""

    posterior: Posterior
    epochs: int
    held_out: tuple[float, ...]  # log-likelihood after each epoch


def train(
    network: Network, schedule: Schedule, x: Array, y: Array, ranks: int
) -> tuple[DDPSequential, Trained]:
    """Train a new network; each rank on its part of each batch, so that all is as by one."""
    if ranks > 1:
        trained = launch(_train_rank, nprocs=ranks, args=(network, schedule, x, y))[0]
        return accelerate(network.build(trained.posterior)), trained
    model = accelerate(network.build())
    trained = _train(model, network, schedule, x, y)
    if schedule.patience is not None:  # the best epoch was not the last
        load(model, trained.posterior)
    return model, trained


def _train_rank(network: Network, schedule: Schedule, x: Array, y: Array) -> Trained:
    with DDPSequential(network.build(), DDPConfig.from_env(), average=False) as model:
        return _train(model, network, schedule, x, y)


def _train(model: Any, network: Network, schedule: Schedule, x: Array, y: Array) -> Trained:
    rng = np.random.default_rng(network.seed)
    likelihood, scores = network.likelihood, list[float]()
    if schedule.patience is None:
        _train_epochs(model, likelihood, schedule, rng, x, y, lambda: False)
        return Trained(posterior_of(model), schedule.epochs, ())
    held, kept = np.split(rng.permutation(len(x)), [schedule.held_out])
    best, waited, posterior = -np.inf, 0, posterior_of(model)

    def enough() -> bool:
        nonlocal best, waited, posterior
        scores.append(likelihood.log(*outputs_of(model, x[held]), y[held]))
        waited += 1
        if scores[-1] > best + schedule.tolerance:
            best, waited, posterior = scores[-1], 0, posterior_of(model)
        return waited >= (schedule.patience or 0)

    _train_epochs(model, likelihood, schedule, rng, x[kept], y[kept], enough)
    return Trained(posterior, len(scores), tuple(scores))


def _train_epochs(
    model: Any,
    likelihood: Likelihood,
    schedule: Schedule,
    rng: np.random.Generator,
    x: Array,
    y: Array,
    after_epoch: Callable[[], bool],
) -> None:
    ordered = {"mu_x": x, **likelihood.observe(y)}
    shuffled = {name: np.empty_like(rows) for name, rows in ordered.items()}
    batches = batches_of(model.communicator, schedule.batch_size, shuffled)
    for _ in range(schedule.epochs):
        order = rng.permutation(len(x))
        for name, rows in ordered.items():
            np.take(rows, order, axis=0, out=shuffled[name], mode="clip")
        learn(model, likelihood, batches)
        if after_epoch():
            return


def batches_of(
    communicator: Communicator, size: int, samples: dict[str, Array]
) -> list[tuple[Array | None, ...]]:
    """Return the rank's part of each batch, in their order: views, the arguments of `learn`."""
    rank, ranks = communicator.rank, communicator.size
    count = len(samples["mu_x"])
    own = []
    for begin in range(0, count, size):
        share = share_of(min(size, count - begin), rank, ranks)
        own.append(slice(begin + share.start, begin + share.stop))
    arguments = [samples.get(name) for name in ("mu_x", "mu_obs", "var_obs", "selected_idx")]
    return [tuple(None if rows is None else rows[part] for rows in arguments) for part in own]


def learn(model: Any, likelihood: Likelihood, batches: Iterable[tuple[Array | None, ...]]) -> None:
    """Learn all batches once; ValueError if there is none that the network could learn."""
    # A noise that is predicted as zero or infinite leaves nothing to learn from.
    passed_over = (NotFiniteError,) if likelihood.learns_noise else ()
    step, learned, refused = model.learn, 0, None
    for batch in batches:
        try:
            step(*batch)
        except passed_over as error:
            refused = error
        else:
            learned += 1
    if refused is not None and not learned:
        raise ValueError(
            "no batch could be learned, as the noise predicted for each is zero or infinite: look "
            "for samples far from all others, or give the noise"
        ) from refused


def outputs_of(model: Any, x: Array) -> tuple[Array, Array]:
    """Return means and variances of all outputs, flat; the model goes on in training mode."""
    try:
        model.eval()
        mean, variance = model(x)
    finally:  # also after Ctrl-C
        model.train()
    return mean, variance


def load(model: Any, posterior: Posterior) -> None:
    """Let the model have these parameters."""
    model.load_state_dict(
        {name: tuple(map(np.ndarray.tolist, parts)) for name, parts in posterior.items()}
    )


def posterior_of(model: Any) -> Posterior:
    """Return a copy of a model's parameters."""
    return {
        name: tuple(np.array(part, np.float32) for part in parts)
        for name, parts in model.state_dict().items()
    }
