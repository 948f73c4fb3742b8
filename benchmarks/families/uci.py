"""Regression sets of the UCI repository by the protocol of the published tables; see `rows`."""

from __future__ import annotations

import hashlib
import io
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import Communicator, map_networks
from tagi_ddp.sklearn import TAGIRegressor

FOLDER = "TAGI_DDP_UCI_DATA"
SECONDS = 60.0  # all sets, all splits, on 2 cores
EQUAL = 1e-4  # of two ranks and one, relative
EPOCHS = 100


@dataclass(frozen=True)
class Published:
    """RMSE, as it was printed, and log-likelihood, in the target's units, means over the splits."""

    printed_rmse: str
    log_likelihood: float

    @property
    def rmse(self) -> float:
        return float(self.printed_rmse)

    @property
    def rounding(self) -> float:
        """The rounding error of the RMSE: half of its last digit."""
        return 0.5 * 10.0 ** -len(self.printed_rmse.partition(".")[2])


@dataclass(frozen=True)
class Dataset:
    """A set, the settings that its figures were published with, and these.

    ``plain``: 100 epochs, with the noise ``sigma_v`` of standardized targets. ``heteroscedastic``:
    a noise that is learned, with early stopping; see `_all_splits`.
    """

    name: str
    digest: str  # SHA-256 of the file
    sigma_v: float
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
        plain=Published("2.913", -2.524),
        heteroscedastic=Published("3.120", -2.541),
    ),
    Dataset(
        "concrete",
        "7ac7ee2bcf2d718442c0b39208c82ef8947620f57abaa80d1f05f870d014e42e",
        sigma_v=0.3,
        plain=Published("5.522", -3.141),
        heteroscedastic=Published("6.048", -3.208),
    ),
    Dataset(
        "energy",
        "c9c27c962e0607b9bc65575d1779e4d970ff792e383abfa0c58d41d3ab57a7b7",
        sigma_v=0.1,
        plain=Published("1.115", -1.56),
        heteroscedastic=Published("1.882", -1.851),
        features=8,
        target=8,
    ),
    Dataset(
        "yacht",
        "476eb6bc977d5433bf440844fd9ea7b4ea1d6f531c8d4acb0502caf242056fd6",
        sigma_v=0.1,
        plain=Published("0.979", -1.562),
        heteroscedastic=Published("1.797", -1.643),
        batch=5,
    ),
    Dataset(
        "wine",
        "a9a7a471d6d5a5414d6a4c35e82a8b7ceafdb5e2c8449993108709852d67fd1e",
        sigma_v=0.7,
        plain=Published("0.628", -0.968),
        heteroscedastic=Published("0.639", -0.972),
    ),
    Dataset(
        "kin8nm",
        "4e028d61d2df721741c406bbe57fc224d1328ac07c2d896ae26f44b95a4935f9",
        sigma_v=0.3,
        plain=Published("0.0912", 0.953),
        heteroscedastic=Published("0.101", 0.883),
    ),
    Dataset(
        "naval",
        "1c11684aec749d53a5d53f21e69106b9bd966d087d12138fb2a94b530b48c8d0",
        sigma_v=0.6,
        plain=None,
        heteroscedastic=Published("0.006", 3.748),
        features=16,
        target=16,
    ),
    Dataset(
        "power",
        "5550d2495abf9066ace21e06834b7b3708555a17d3e086576bb11abbf9f7e25c",
        sigma_v=0.2,
        plain=Published("4.084", -2.863),
        heteroscedastic=Published("4.148", -2.841),
    ),
    Dataset(
        "protein",
        "e462248fca30cb27812ea12de70bc0dd134fe71843188c6dfc07bf5c2217ea87",
        sigma_v=0.7,
        plain=Published("4.546", -2.937),
        heteroscedastic=Published("4.644", -2.924),
        hidden=100,
    ),
)


# How a split is trained, in front of its rows' names.
PLAIN, HETEROSCEDASTIC, STOPPING = KINDS = (
    "",
    "heteroscedastic, ",
    "heteroscedastic, early stopping, ",
)


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
    """Training and test rows."""

    def __init__(self, dataset: Dataset, number: int) -> None:
        arrays = _read(Path(os.environ[FOLDER]), dataset)
        assert not isinstance(arrays, str)
        data, tests = arrays
        inputs = data[:, : dataset.features or data.shape[1] - 1]
        target = data[:, dataset.target]
        test = np.isin(np.arange(len(data)), tests[number])
        self.x, self.y = inputs[~test], target[~test]
        self.test_x, self.test_y = inputs[test], target[test]

    def score(self, model: TAGIRegressor) -> dict[str, float]:
        """Return RMSE and mean log-likelihood of the test rows, in the target's units."""
        mean, deviation = model.predict(self.test_x, return_std=True)
        error = self.test_y - mean
        likelihood = -0.5 * (error / deviation) ** 2 - np.log(np.sqrt(2 * np.pi) * deviation)
        return {"rmse": float(np.sqrt((error**2).mean())), "ll": float(likelihood.mean())}


def regressor(
    dataset: Dataset, split: Split, epochs: int, kind: str = PLAIN, stops: bool = False
) -> TAGIRegressor:
    """Return what is trained, with the settings of the set; ``stops``: early, epochs at most."""
    return TAGIRegressor(
        hidden_layer_sizes=(dataset.hidden,),
        noise=dataset.sigma_v * split.y.std() if kind == PLAIN else None,
        max_iter=epochs,
        batch_size=dataset.batch,
        n_networks=1,
        early_stopping=stops,
        n_iter_no_change=5,
        tol=0.01,
        random_state=0,
    )


def _train_split(item: tuple[int, int, int, str, bool]) -> dict[str, float]:
    place, number, epochs, kind, stops = item
    dataset = DATASETS[place]
    split = Split(dataset, number)
    start = time.perf_counter()
    model = regressor(dataset, split, epochs, kind, stops).fit(split.x, split.y)
    seconds = time.perf_counter() - start
    return {**split.score(model), "seconds": seconds, "epochs": model.n_iter_}


def _all_splits(
    communicator: Communicator, kind: str, most_epochs: int, most: int | None
) -> dict[str, list[dict[str, float]]]:
    """Return the results of each set's splits.

    Early stopping is that of the published figures: a tenth of each split's training rows tells
    when it would stop; all splits of a set are trained for the mean of these numbers of epochs, on
    all training rows.
    """
    epochs = {dataset.name: most_epochs for dataset in DATASETS}
    if kind == STOPPING:
        stopped = _map_splits(communicator, epochs, kind, most, stops=True)
        for name, results in stopped.items():
            epochs[name] = max(1, round(np.mean([result["epochs"] for result in results])))
    return _map_splits(communicator, epochs, kind, most, stops=False)


def _map_splits(
    communicator: Communicator, epochs: dict[str, int], kind: str, most: int | None, stops: bool
) -> dict[str, list[dict[str, float]]]:
    items, weights = [], []
    for place, dataset in enumerate(DATASETS):
        arrays = _read(Path(os.environ[FOLDER]), dataset)
        assert not isinstance(arrays, str)
        for number in range(len(arrays[1]))[:most]:
            items.append((place, number, epochs[dataset.name], kind, stops))
            weights.append(float(len(arrays[0]) * dataset.hidden * epochs[dataset.name]))
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
        near = error + published.rounding
        bars = published.rmse / (published.rmse + near), float(np.exp(-spread))
        if kind == HETEROSCEDASTIC:  # which was published with early stopping
            bars = None, None
    return [
        Row(
            f"{name}RMSE, {results[0]['epochs']} epochs, {seconds:.2f} s a split",
            *(ours, theirs, "RMSE", bars[0]),
        ),
        Row(
            f"{name}log-likelihood {likelihood.mean():.3f}", ours_p, theirs_p, "perplexity", bars[1]
        ),
    ]


def _together(communicator: Communicator, dataset: Dataset, epochs: int) -> Row:
    """One split by as many ranks together, each its part of a batch, and by one alone."""
    split = Split(dataset, 0)
    found = np.zeros(2)
    if communicator.rank == 0:
        for place, ranks in enumerate((communicator.size, 1)):
            model = regressor(dataset, split, epochs).set_params(n_ranks=ranks)
            found[place] = split.score(model.fit(split.x, split.y))["rmse"]
    communicator.broadcast(found)
    name = f"{dataset.name}, {epochs} epochs, {communicator.size} ranks together, and one"
    worse, better = sorted(found.tolist(), reverse=True)  # neither may be the better one
    return Row(name, Figure.single(worse), Figure.single(better), "RMSE", 1 - EQUAL)


def _hundred(communicator: Communicator, epochs: int) -> Row:
    """A hundred networks of 20 splits and 5 seeds: ours over the ranks, plain ones in turn."""
    boston = DATASETS[0]
    splits = [Split(boston, number) for number in range(20)]

    def ours(number: int) -> str:
        split = splits[number % 20]
        model = regressor(boston, split, epochs).set_params(random_state=number)
        parts = model.fit(split.x, split.y).posterior_.values()
        return hashlib.sha256(
            b"".join(part.tobytes() for each in parts for part in each)
        ).hexdigest()

    start = time.perf_counter()
    digests = map_networks(ours, range(100), communicator=communicator)
    seconds = time.perf_counter() - start
    if ours(41) != digests[41]:
        raise RuntimeError("a network is not that of its lone run")

    plain_seconds = np.zeros(1)
    if communicator.rank == 0:
        start = time.perf_counter()
        for number in range(100):
            _train_plain(boston, splits[number % 20], epochs)
        plain_seconds[0] = time.perf_counter() - start
    communicator.broadcast(plain_seconds)
    name = f"100 networks, {communicator.size} ranks, against plain pytagi, one after another"
    return Row(name, Figure.single(seconds), Figure.single(float(plain_seconds[0])), "s", 10.0)


def _train_plain(dataset: Dataset, split: Split, epochs: int) -> None:
    """Train the same network by pytagi's own calls."""
    inputs, targets = ((part - part.mean(0)) / part.std(0) for part in (split.x, split.y))
    inputs, targets = inputs.astype(np.float32), targets.astype(np.float32)
    model = Sequential(Linear(inputs.shape[1], dataset.hidden), ReLU(), Linear(dataset.hidden, 1))
    model.set_threads(1)
    update = OutputUpdater("cpu")._cpp_backend.update  # without what this package adds
    rng = np.random.default_rng(0)
    for _ in range(epochs):
        order = rng.permutation(len(inputs))
        x, y = inputs[order], targets[order]
        for begin in range(0, len(x), dataset.batch):
            own_x, own_y = x[begin : begin + dataset.batch], y[begin : begin + dataset.batch]
            model(own_x.ravel())
            noise = [dataset.sigma_v**2] * len(own_y)
            update(model.output_z_buffer, own_y.ravel(), noise, model.input_delta_z_buffer)
            model.backward()
            model.step()
