"""Forecasts of the tourism competition by networks beside a level and a trend; see `rows`."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from hybrid import Hybrid
from pytagi.nn import Sequential
from tourism import predict_all, scores

from benchmarks.harness.datasets import series
from benchmarks.harness.measure import Contender, Figure, Missing, Row, measure
from tagi_ddp import Communicator

SEEDS, EPOCHS = 3, 50
PERIODS = {  # season, and the published normalised deviation and mean absolute scaled error
    "monthly": (12, 0.1024, 1.619),
    "quarterly": (4, 0.0726, 1.583),
}
NEAR = 1.03  # times the published error


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """366 monthly and 427 quarterly series, each by networks of its own, against published errors.

    V.-D. Vuong, L.-H. Nguyen, J.-A. Goulet, International Journal of Forecasting, 2025: TAGI-LSTM
    beside a state-space model, 50 units, learned noise, 50 epochs, 3 seeds. And a pass over series,
    by our kernels and by pytagi's.
    """
    table: list[Row] = []
    known = series("tcomp_data.json")
    if isinstance(known, str):
        return [Row("tourism", Missing(known), Missing(known), "", None)]
    seeds, epochs, count = (1, 2, 3) if quick else (SEEDS, EPOCHS, None)
    for period, (season, deviation, scaled) in PERIODS.items():
        chosen = [one for one in known if one["period"] == [period.upper()]][:count]
        past = [np.array(one["x"]) for one in chosen]
        future = np.array([one["xx"] for one in chosen])
        start = time.perf_counter()
        found = predict_all(past, season, future.shape[1], epochs, seeds, communicator)
        seconds = time.perf_counter() - start
        naive = np.array([np.resize(one[-season:], future.shape[1]) for one in past])
        ours = scores(past, future, *found, season)
        simple = scores(past, future, naive, 0 * naive, season)
        table += [
            Row(f"{period}, {name}", Figure.single(own), Figure.single(other), "", target)
            for name, own, other, target in (
                ("normalised deviation", ours[0], deviation, 1 / NEAR),
                ("normalised deviation, against the seasonal naive", ours[0], simple[0], None),
                ("mean absolute scaled error", ours[1], scaled, 1 / NEAR),
                ("scaled error, against the seasonal naive", ours[1], simple[1], None),
            )
        ]
        none = Missing("95 % are expected")
        table.append(
            Row(f"{period}, coverage of 95 % intervals", Figure.single(ours[2]), none, "", None)
        )
        none = Missing("no time was published")
        name = f"{period}, {len(past)} series, {seeds} seeds, {epochs} epochs twice"
        table.append(Row(name, Figure.single(seconds), none, "s", None))
    table.append(_pass(communicator, past[:2] if quick else past[:20]))
    return table


def _pass(communicator: Communicator, past: list[np.ndarray]) -> Row:
    """A pass over quarterly series, by our kernels and by pytagi's."""
    standard = [(one - one.mean()) / one.std() for one in past]
    everything = np.arange(len(past))
    ours = Hybrid(standard, 4, 0)
    plain = Hybrid(standard, 4, 0, wrap=_begin)
    contenders = [
        Contender(name, lambda model=model: model.train(everything), alone=True)
        for name, model in (("ours", ours), ("pytagi", plain))
    ]
    found = measure(communicator, contenders, 5)
    name = f"a pass over {len(past)} series, against pytagi's kernels"
    return Row(name, found["ours"], found["pytagi"], "s", None)


def _begin(network: Sequential) -> Sequential:
    """Return a network of pytagi with states: without a forward pass it cannot reset them."""
    network(np.zeros(5, np.float32))
    return network
