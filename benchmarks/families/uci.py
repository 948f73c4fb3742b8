"""Regression sets of the UCI repository by the protocol of the published tables; see `rows`."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pytagi.nn import EvenExp, Linear, OutputUpdater, ReLU, Sequential

from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import (
    Communicator,
    DDPSequential,
    NotFiniteError,
    accelerate,
    init,
    map_networks,
)

FOLDER = "TAGI_DDP_UCI_DATA"
SECONDS = 60.0  # all sets, all splits, on 2 cores
EQUAL = 1e-4  # of two ranks and one, relative
EPOCHS = 100


@dataclass(frozen=True)
class Published:
    """RMSE and log-likelihood, in the target's units, means over the splits."""

    rmse: float
    log_likelihood: float


@dataclass(frozen=True)
class Dataset:
    """A set, the settings that its figures were published with, and these.

    ``plain``: 100 epochs, with the noise ``sigma_v`` of standardized targets. ``heteroscedastic``:
    with early stopping, which is another protocol than ours of 100 epochs; ``gains`` are those of
    the output layer, and of its noise.
    """

    name: str
    digest: str  # SHA-256 of the file
    sigma_v: float
    gains: tuple[float, float]
    plain: Published | None
    heteroscedastic: Published
    features: int | None = None  # all but the last column
    target: int = -1
    hidden: int = 50
    batch: int = 10


DATASETS = (
    Dataset(
        "boston",
        "1b6a088f82d727f44fe8bac834a63c7048f2c6fcbd13127d42a214a1fd2b8564",
        sigma_v=0.3,
        gains=(0.5, 0.01),
        plain=Published(2.913, -2.524),
        heteroscedastic=Published(3.12, -2.541),
    ),
    Dataset(
        "concrete",
        "7ac7ee2bcf2d718442c0b39208c82ef8947620f57abaa80d1f05f870d014e42e",
        sigma_v=0.3,
        gains=(0.5, 0.01),
        plain=Published(5.522, -3.141),
        heteroscedastic=Published(6.048, -3.208),
    ),
    Dataset(
        "energy",
        "c9c27c962e0607b9bc65575d1779e4d970ff792e383abfa0c58d41d3ab57a7b7",
        sigma_v=0.1,
        gains=(0.5, 0.01),
        plain=Published(1.115, -1.56),
        heteroscedastic=Published(1.882, -1.851),
        features=8,
        target=8,
    ),
    Dataset(
        "yacht",
        "476eb6bc977d5433bf440844fd9ea7b4ea1d6f531c8d4acb0502caf242056fd6",
        sigma_v=0.1,
        gains=(0.1, 0.1),
        plain=Published(0.979, -1.562),
        heteroscedastic=Published(1.797, -1.643),
        batch=5,
    ),
    Dataset(
        "wine",
        "a9a7a471d6d5a5414d6a4c35e82a8b7ceafdb5e2c8449993108709852d67fd1e",
        sigma_v=0.7,
        gains=(0.1, 0.01),
        plain=Published(0.628, -0.968),
        heteroscedastic=Published(0.639, -0.972),
    ),
    Dataset(
        "kin8nm",
        "4e028d61d2df721741c406bbe57fc224d1328ac07c2d896ae26f44b95a4935f9",
        sigma_v=0.3,
        gains=(1.0, 0.01),
        plain=Published(0.0912, 0.953),
        heteroscedastic=Published(0.101, 0.883),
    ),
    Dataset(
        "naval",
        "1c11684aec749d53a5d53f21e69106b9bd966d087d12138fb2a94b530b48c8d0",
        sigma_v=0.6,
        gains=(0.5, 0.01),
        plain=None,
        heteroscedastic=Published(0.006, 3.748),
        features=16,
        target=16,
    ),
    Dataset(
        "power",
        "5550d2495abf9066ace21e06834b7b3708555a17d3e086576bb11abbf9f7e25c",
        sigma_v=0.2,
        gains=(0.5, 0.001),
        plain=Published(4.084, -2.863),
        heteroscedastic=Published(4.148, -2.841),
    ),
    Dataset(
        "protein",
        "e462248fca30cb27812ea12de70bc0dd134fe71843188c6dfc07bf5c2217ea87",
        sigma_v=0.7,
        gains=(0.5, 0.1),
        plain=Published(4.546, -2.937),
        heteroscedastic=Published(4.644, -2.924),
        hidden=100,
    ),
)


# How a split is trained, in front of its rows' names.
PLAIN, HETEROSCEDASTIC, STOPPING = KINDS = (
    "",
    "heteroscedastic, ",
    "heteroscedastic, early stopping, ",
)
PATIENCE, IMPROVEMENT = 5, 0.01  # epochs, and of the held-out rows' mean log-likelihood


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """RMSE and likelihood of all splits, by ranks side by side; and one split by all together.

    One hidden layer, ReLU, batches of 10, inputs and targets standardized by the training rows, 20
    splits of 10 % test rows (protein 5): J. M. Hernandez-Lobato, R. P. Adams, Probabilistic
    backpropagation for scalable learning of Bayesian neural networks, ICML 2015. Figures are means
    [one standard error less, and more]. A likelihood is shown as a perplexity, exp(-mean).
    """
    folder = Path(os.environ.get(FOLDER, ""))
    found = [_read(folder, dataset) for dataset in DATASETS]
    missing = [one for one in found if isinstance(one, str)]
    if missing:
        reason = Missing(f"{FOLDER} names no folder with {missing[0]}")
        return [Row("UCI", reason, reason, "", None)]
    epochs = 1 if quick else EPOCHS
    table: list[Row] = []
    for kind in KINDS:
        start = time.perf_counter()
        results = _all_splits(communicator, kind, epochs, 1 if quick else None)
        seconds = time.perf_counter() - start
        for dataset in DATASETS:
            table += _compare(dataset, kind, results[dataset.name])
        limit = Figure.single(SECONDS)
        table.append(Row(f"{kind}all sets and splits", Figure.single(seconds), limit, "s", 1.0))
    for dataset in DATASETS:
        table.append(_together(communicator, dataset, 1 if quick else 10))
    table.append(_hundred(communicator, 1 if quick else 100))
    return table


def _read(folder: Path, dataset: Dataset) -> tuple[np.ndarray, np.ndarray] | str:
    """Return the rows and each split's test rows; or the file's name, and what is wrong with it."""
    path = folder / f"{dataset.name}.npz"
    try:
        content = path.read_bytes()
    except OSError:
        return path.name
    digest = hashlib.sha256(content).hexdigest()
    if digest != dataset.digest:
        return f"the right {path.name}: its SHA-256 is {digest}, not {dataset.digest}"
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return arrays["data"], arrays["test"]


class Split:
    """Standardized training and test rows."""

    def __init__(self, dataset: Dataset, number: int) -> None:
        arrays = _read(Path(os.environ[FOLDER]), dataset)
        assert not isinstance(arrays, str)
        data, tests = arrays
        inputs = data[:, : dataset.features or data.shape[1] - 1]
        target = data[:, dataset.target]
        test = np.isin(np.arange(len(data)), tests[number])
        mean, deviation = inputs[~test].mean(0), inputs[~test].std(0)
        scaled = (inputs - mean) / np.where(deviation == 0, 1, deviation)
        self.center, self.scale = target[~test].mean(), target[~test].std()
        self.x = np.ascontiguousarray(scaled[~test], np.float32)
        self.y = ((target[~test] - self.center) / self.scale).astype(np.float32)[:, None]
        self.test_x = np.ascontiguousarray(scaled[test], np.float32)
        self.test_y = target[test]

    def hold_out(self) -> Callable[[Any, Dataset], float]:
        """Take a tenth of the training rows away; return what tells their log-likelihood."""
        order = np.random.default_rng(1).permutation(len(self.x))
        held, kept = np.split(order, [len(order) // 10])
        x, y = self.x[held], self.y[held, 0].astype(np.float64) * self.scale + self.center
        self.x, self.y = self.x[kept], self.y[kept]
        return lambda model, dataset: self._score(model, dataset, True, x, y)["ll"]

    def score(self, model: Any, dataset: Dataset, heteroscedastic: bool) -> dict[str, float]:
        """Return RMSE and mean log-likelihood of the test rows, in the target's units."""
        return self._score(model, dataset, heteroscedastic, self.test_x, self.test_y)

    def _score(
        self, model: Any, dataset: Dataset, heteroscedastic: bool, x: np.ndarray, y: np.ndarray
    ) -> dict[str, float]:
        model.eval()
        mean, variance = model(x)
        model.train()
        if heteroscedastic:
            mean, variance = mean[::2], variance[::2] + mean[1::2]
        else:
            variance = variance + np.float32(dataset.sigma_v) ** 2
        mean = mean.astype(np.float64) * self.scale + self.center
        variance = variance.astype(np.float64) * self.scale**2
        error = y - mean
        likelihood = -0.5 * (np.log(2 * np.pi * variance) + error**2 / variance)
        return {"rmse": float(np.sqrt((error**2).mean())), "ll": float(likelihood.mean())}


def network(dataset: Dataset, inputs: int, heteroscedastic: bool) -> Sequential:
    """Return a network of one hidden layer; He's initialization."""
    if not heteroscedastic:
        return Sequential(Linear(inputs, dataset.hidden), ReLU(), Linear(dataset.hidden, 1))
    model = Sequential(Linear(inputs, dataset.hidden), ReLU(), Linear(dataset.hidden, 2), EvenExp())
    # The published gains are of the variances that the output layer begins with.
    handle = model.layers[2]
    for name in ("var_w", "var_b"):
        values = np.array(getattr(handle, name), np.float32).reshape(2, -1)
        values *= np.array(dataset.gains, np.float32)[:, None]
        setattr(handle, name, values.ravel().tolist())
    return model


def train(
    model: Any,
    dataset: Dataset,
    split: Split,
    epochs: int,
    heteroscedastic: bool,
    rank: int = 0,
    ranks: int = 1,
    after_epoch: Callable[[], bool] = lambda: False,
) -> None:
    """Train on each batch's rows number ``rank``, ``rank + ranks``, ... until all epochs are over.

    Or ``after_epoch`` says that it is enough.
    """
    rng = np.random.default_rng(0)
    noise = np.full_like(split.y, dataset.sigma_v**2)
    for _ in range(epochs):
        order = rng.permutation(len(split.x))
        x, y = split.x[order], split.y[order]
        for begin in range(0, len(x), dataset.batch):
            own = slice(begin + rank, begin + dataset.batch, ranks)
            if not heteroscedastic:
                model.learn(x[own], y[own], noise[own])
                continue
            # A noise that is predicted as zero or infinite leaves nothing to learn from.
            with suppress(NotFiniteError):
                model.learn(x[own], y[own])
        if after_epoch():
            return


def train_until_it_is_enough(model: Any, dataset: Dataset, split: Split, epochs: int) -> None:
    """Train until the likelihood of a tenth of the rows improves no more; keep the best epoch's."""
    likelihood = split.hold_out()
    best, waited, state = -np.inf, 0, model.state_dict()

    def enough() -> bool:
        nonlocal best, waited, state
        now = likelihood(model, dataset)
        waited += 1
        if now > best + IMPROVEMENT:
            best, waited, state = now, 0, model.state_dict()
        return waited == PATIENCE

    train(model, dataset, split, epochs, True, after_epoch=enough)
    model.load_state_dict(state)


def _train_split(item: tuple[int, int, int, str]) -> dict[str, float]:
    place, number, epochs, kind = item
    dataset = DATASETS[place]
    split = Split(dataset, number)
    heteroscedastic = kind != PLAIN
    model = accelerate(network(dataset, split.x.shape[1], heteroscedastic))
    start = time.perf_counter()
    if kind == STOPPING:
        train_until_it_is_enough(model, dataset, split, epochs)
    else:
        train(model, dataset, split, epochs, heteroscedastic)
    seconds = time.perf_counter() - start
    return {**split.score(model, dataset, heteroscedastic), "seconds": seconds}


def _all_splits(
    communicator: Communicator, kind: str, epochs: int, most: int | None
) -> dict[str, list[dict[str, float]]]:
    items, weights = [], []
    for place, dataset in enumerate(DATASETS):
        arrays = _read(Path(os.environ[FOLDER]), dataset)
        assert not isinstance(arrays, str)
        for number in range(len(arrays[1]))[:most]:
            items.append((place, number, epochs, kind))
            weights.append(float(len(arrays[0]) * dataset.hidden))
    results = map_networks(_train_split, items, weights=weights, communicator=communicator)
    by_set: dict[str, list[dict[str, float]]] = {}
    for (place, *_), result in zip(items, results, strict=True):
        by_set.setdefault(DATASETS[place].name, []).append(result)
    return by_set


def _compare(dataset: Dataset, kind: str, results: list[dict[str, float]]) -> list[Row]:
    published = dataset.plain if kind == PLAIN else dataset.heteroscedastic
    name = f"{dataset.name}, {kind}"
    rmse = np.array([result["rmse"] for result in results])
    likelihood = np.array([result["ll"] for result in results])
    seconds = np.median([result["seconds"] for result in results])
    error = rmse.std(ddof=1) / np.sqrt(len(rmse)) if len(rmse) > 1 else 0.0
    spread = likelihood.std(ddof=1) / np.sqrt(len(rmse)) if len(rmse) > 1 else 0.0
    value, perplexity = rmse.mean(), np.exp(-likelihood.mean())
    ours = Figure(value, value - error, value + error)
    ours_p = Figure(perplexity, perplexity * np.exp(-spread), perplexity * np.exp(spread))
    if published is None:
        none = Missing("no figure was published")
        theirs: Figure | Missing = none
        theirs_p: Figure | Missing = none
        bars: tuple[float | None, float | None] = None, None
    else:
        other = np.exp(-published.log_likelihood)
        theirs, theirs_p = Figure.single(published.rmse), Figure.single(other)
        bars = published.rmse / (published.rmse + error), float(np.exp(-spread))
        if kind == HETEROSCEDASTIC:  # which was published with early stopping
            bars = None, None
    return [
        Row(f"{name}RMSE, {seconds:.2f} s a split", ours, theirs, "RMSE", bars[0]),
        Row(
            f"{name}log-likelihood {likelihood.mean():.3f}", ours_p, theirs_p, "perplexity", bars[1]
        ),
    ]


def _together(communicator: Communicator, dataset: Dataset, epochs: int) -> Row:
    """One split by all ranks together, each its part of a batch, and by one alone."""
    import pytagi

    split = Split(dataset, 0)
    figures = []
    for ranks in (communicator.size, 1):
        pytagi.manual_seed(0)
        plain = network(dataset, split.x.shape[1], False)
        if ranks == 1:
            model = accelerate(plain)
        else:
            model = DDPSequential(plain, average=False, communicator=communicator)
        train(model, dataset, split, epochs, False, communicator.rank % ranks, ranks)
        figures.append(Figure.single(split.score(model, dataset, False)["rmse"]))
    name = f"{dataset.name}, {epochs} epochs, {communicator.size} ranks together, against one"
    return Row(name, figures[0], figures[1], "RMSE", 1 - EQUAL)


def _hundred(communicator: Communicator, epochs: int) -> Row:
    """A hundred networks of 20 splits and 5 seeds: ours over the ranks, plain ones in turn."""
    boston = DATASETS[0]
    splits = [Split(boston, number) for number in range(20)]

    def ours(number: int) -> str:
        split = splits[number % 20]
        model = accelerate(network(boston, split.x.shape[1], False))
        train(model, boston, split, epochs, False)
        return model.check_replicas()

    start = time.perf_counter()
    digests = map_networks(ours, range(100), communicator=communicator)
    seconds = time.perf_counter() - start
    with init(rank=0, world_size=1) as alone:
        again = map_networks(ours, [41], seed=41, communicator=alone)
    if again != digests[41:42]:
        raise RuntimeError("a network is not that of its lone run")

    plain_seconds = np.zeros(1)
    if communicator.rank == 0:
        start = time.perf_counter()
        for number in range(100):
            split = splits[number % 20]
            _train_plain(network(boston, split.x.shape[1], False), boston, split, epochs)
        plain_seconds[0] = time.perf_counter() - start
    communicator.broadcast(plain_seconds)
    name = f"100 networks, {communicator.size} ranks, against plain pytagi, one after another"
    return Row(name, Figure.single(seconds), Figure.single(float(plain_seconds[0])), "s", 10.0)


def _train_plain(model: Sequential, dataset: Dataset, split: Split, epochs: int) -> None:
    model.set_threads(1)
    update = OutputUpdater("cpu")._cpp_backend.update  # without what this package adds
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(split.x))
        x, y = split.x[order], split.y[order]
        for begin in range(0, len(x), dataset.batch):
            own_x, own_y = x[begin : begin + dataset.batch], y[begin : begin + dataset.batch]
            model(own_x.ravel())
            noise = [dataset.sigma_v**2] * len(own_y)
            update(model.output_z_buffer, own_y.ravel(), noise, model.input_delta_z_buffer)
            model.backward()
            model.step()
