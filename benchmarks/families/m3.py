"""Forecasts of the M3 competition by the model of the family `tourism`; see `rows`."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from tourism import predict_all, scores

from benchmarks.harness.datasets import series
from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import Communicator

SEEDS, EPOCHS = 1, 50
SEASONS = {"yearly": 1, "quarterly": 4, "monthly": 12, "other": 1}
# Means over all series of the competition's best methods: sMAPE, in %, of S. Makridakis, M. Hibon,
# International Journal of Forecasting, 2000; MASE of the page Comparisons of R's package Mcomp.
BEST = {"Theta": (13.01, 1.39), "ForecastPro": (13.19, 1.47)}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """3,003 series: symmetric and scaled errors, and coverage, beside the competition's."""
    known = series("m3_data.json")
    if isinstance(known, str):
        return [Row("M3", Missing(known), Missing(known), "", None)]
    seeds, epochs, count = (1, 2, 2) if quick else (SEEDS, EPOCHS, None)
    table, all_errors, simple_errors, scaled, total = [], [], [], [], 0.0
    for kind, season in SEASONS.items():
        chosen = [one for one in known if one["period"] == [kind.upper()]][:count]
        past = [np.array(one["x"], float) for one in chosen]
        future = np.array([one["xx"] for one in chosen])
        start = time.perf_counter()
        mean, variance = predict_all(past, season, future.shape[1], epochs, seeds, communicator)
        total += time.perf_counter() - start
        naive = np.array([np.resize(one[-season:], future.shape[1]) for one in past])
        all_errors.append(_symmetric(future, mean))
        simple_errors.append(_symmetric(future, naive))
        _, ours, coverage = scores(past, future, mean, variance, season)
        scaled.append((ours, len(past)))
        _, simple, _ = scores(past, future, naive, 0 * naive, season)
        name = f"M3, {len(past)} {kind} series, "
        table += [
            _row(
                name + "sMAPE, against the seasonal naive", all_errors[-1], simple_errors[-1], "%"
            ),
            Row(name + "MASE, against it", Figure.single(ours), Figure.single(simple), "", None),
            _alone(name + "coverage of 95 % intervals", coverage, ""),
        ]
    table.append(
        _row(
            "M3, all series, sMAPE, against the seasonal naive",
            *map(np.concatenate, (all_errors, simple_errors)),
            "%",
        )
    )
    errors, counts = zip(*scaled, strict=True)
    ours = float(np.concatenate(all_errors).mean()), np.average(errors, weights=counts)
    for name, others in BEST.items():
        for kind, own, other, unit in zip(("sMAPE", "MASE"), ours, others, ("%", ""), strict=True):
            figures = Figure.single(own), Figure.single(other)
            table.append(Row(f"M3, all series, {kind}, against {name}", *figures, unit, None))
    table.append(_alone(f"M3, {seeds} seeds, {epochs} epochs twice, in all", total, "s"))
    return table


def _symmetric(future: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Return the symmetric absolute percentage errors, flat."""
    return (200 * np.abs(future - mean) / (np.abs(future) + np.abs(mean))).ravel()


def _row(name: str, ours: np.ndarray, other: np.ndarray, unit: str) -> Row:
    return Row(
        name, Figure.single(float(ours.mean())), Figure.single(float(other.mean())), unit, None
    )


def _alone(name: str, value: float, unit: str) -> Row:
    return Row(name, Figure.single(value), Missing("nothing to compare with"), unit, None)
