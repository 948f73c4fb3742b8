"""Small networks, one thread: plain pytagi, the backend's kernels, torch, and who "auto" takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytagi.nn import LSTM, SLSTM, Linear, OutputUpdater, ReLU, Sequential, SLinear

from benchmarks.harness.measure import Contender, Figure, Row, measure
from tagi_ddp import Communicator, DDPSequential, accelerate

FOUR_CALLS, ONE_CALL, SMOOTHER, AUTO = 2.0, 5.0, 2.0, 0.95
SECOND_RANK = 8.0  # microseconds that a second rank may cost
FLOOR = 80.0  # microseconds of a step by torch, however small the network of two layers is
SERIES = 4096  # steps, more than any sample takes
SAMPLE_SECONDS = 0.001
# In a cell of the grid, who is that near to the best is measured so long, on so many networks.
NEAR, CELL_SECONDS, NETWORKS = 1.5, 0.2, 8
WAYS = ("plain", "engine", "native", "torch")


@dataclass(frozen=True)
class Case:
    """A network and a batch for it."""

    name: str
    network: Callable[[], Sequential]
    inputs: int
    batch: int


def regression(*widths: int) -> Callable[[], Sequential]:
    """Return how to make linear layers of these inputs and outputs, ReLU between them."""

    def make() -> Sequential:
        layers: list[Any] = []
        for before, after in pairwise(widths):
            layers += [Linear(before, after), ReLU()]
        return Sequential(*layers[:-1])

    return make


def recurrent(width: int, steps: int) -> Callable[[], Sequential]:
    return lambda: Sequential(
        LSTM(1, width, seq_len=steps), LSTM(width, width, seq_len=steps), Linear(width * steps, 1)
    )


def smoother() -> Sequential:
    return Sequential(SLSTM(1, 40, seq_len=1), SLSTM(40, 40, seq_len=1), SLinear(40, 1))


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """Whole steps: of plain pytagi by the four calls of a script; ours by four and by one.

    The grid is ours alone, by one call, and plain's four: "auto" against the best of all, by the
    lower quartiles of the rounds, their mean over several networks: most cells compare the same
    code with itself, other programs only add to what it takes, and where a network's memory happens
    to lie makes a tenth.
    """
    torch.set_num_threads(1)
    if communicator.size > 1:
        return _two_ranks(communicator, quick)
    found = []
    small = [Case("13-50-1", regression(13, 50, 1), 13, batch) for batch in (1, 10)] + [
        Case("LSTM 8-8, sequence 5", recurrent(8, 5), 5, batch) for batch in (1, 4, 16)
    ]
    for case in small[: 1 if quick else None]:
        found += _against_plain(communicator, case, FOUR_CALLS, ONE_CALL, quick)
    found += _against_plain(
        communicator, Case("SLSTM 40-40", smoother, 1, 1), SMOOTHER, None, quick
    )
    for case in small[:2]:
        least = _measure(communicator, {"torch": _learn(case, "torch")}, 3 if quick else 61)
        name = f"{case.name}, batch {case.batch}, learn() by torch, against {FLOOR:g} us"
        found.append(Row(name, least["torch"], Figure.single(FLOOR), "us", 1.0))
    for case in _grid()[: 1 if quick else None]:
        found.append(_auto(communicator, case, quick))
    return found


def _two_ranks(communicator: Communicator, quick: bool) -> list[Row]:
    """Steps of two ranks, each with a half of the batch, against those of one process."""
    found = []
    for hidden, batch in ((50, 16), (100, 64)):
        make = regression(8, hidden, 1)
        whole, half = (Case("", make, 8, size) for size in (batch, batch // 2))
        with DDPSequential(
            make(), communicator=communicator, average=False, compute="native"
        ) as model:
            x, y, noise = _arrays(half)
            x += communicator.rank  # each rank has its own rows
            contenders = [
                Contender("two", partial(model.learn, x, y, noise), calls=200),
                Contender("half", _learn(half, "native"), calls=200, alone=True),
                Contender("whole", _learn(whole, "native"), calls=200, alone=True),
            ]
            for contender in contenders:
                if communicator.rank == 0 or not contender.alone:
                    contender.run()
            figures = measure(communicator, contenders, 3 if quick else 61)
        two, one_half, one = (figures[each.name].in_unit(1e6) for each in contenders)
        limit = Figure(*(value + SECOND_RANK for value in vars(one_half).values()))
        name = f"8-{hidden}-1, batch {batch}, two ranks"
        found += [
            Row(f"{name}, against one with half of it and {SECOND_RANK:g} us", two, limit, "us", 1),
            Row(f"{name}, against one", two, one, "us", 1.0 if batch >= 64 else None),
        ]
    return found


def _grid() -> list[Case]:
    cases = [
        Case(f"{depth} x {width}", regression(*[width] * (depth + 1), 1), width, batch)
        for width in (8, 16, 32, 64, 128, 256)
        for depth in (1, 2, 3)
        for batch in (1, 4, 16, 64, 256)
    ]
    return cases + [
        Case(f"LSTM {width}-{width}, sequence {steps}", recurrent(width, steps), steps, batch)
        for width in (8, 16, 32, 64)
        for steps in (1, 8)
        for batch in (1, 16, 256)
    ]


def _against_plain(
    communicator: Communicator, case: Case, four: float, one: float | None, quick: bool
) -> list[Row]:
    step = {
        "plain": _plain(case),
        "four": _four_calls(case, "native"),
        "one": _learn(case, "native"),
    }
    figures = _measure(communicator, step, 3 if quick else 61)
    name = f"{case.name}, batch {case.batch}"
    return [
        Row(f"{name}, {calls}, against plain pytagi", figures[key], figures["plain"], "us", bar)
        for key, calls, bar in (("four", "four calls", four), ("one", "learn()", one))
    ]


def _auto(communicator: Communicator, case: Case, quick: bool) -> Row:
    figures = _measure(communicator, _steps(case, (*WAYS, "auto")), 3)
    if not quick:
        least = min(figure.median for figure in figures.values())
        near = [way for way, figure in figures.items() if figure.median < NEAR * least]
        rounds = int(CELL_SECONDS / (max(SAMPLE_SECONDS, least * 1e-6) * len(near)))
        found = []
        for _ in range(NETWORKS):
            near = near[1:] + near[:1]  # the one that is made first lies elsewhere than the others
            found.append(_measure(communicator, _steps(case, near), max(5, min(rounds, 101))))
        for way in near:
            lows = [each[way].low for each in found]
            figures[way] = Figure(float(np.mean(lows)), min(lows), max(lows))
    best = min(WAYS, key=lambda way: figures[way].median)
    name = f"{case.name}, batch {case.batch}, auto against the best: {best}"
    return Row(name, figures["auto"], figures[best], "us", AUTO)


def _steps(case: Case, ways: Sequence[str]) -> dict[str, Callable[[], None]]:
    return {way: _plain(case) if way == "plain" else _learn(case, way) for way in ways}


def _measure(
    communicator: Communicator, steps: dict[str, Callable[[], object]], rounds: int
) -> dict[str, Figure]:
    contenders = []
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        calls = int(SAMPLE_SECONDS / max(time.perf_counter() - start, 1e-6))
        contenders.append(Contender(name, step, calls=max(1, min(calls, 200))))
    figures = measure(communicator, contenders, rounds)
    return {name: figure.in_unit(1e6) for name, figure in figures.items()}


def _counted(step: Callable[[], None], model: Any, case: Case) -> Callable[[], None]:
    """Return a step that ends a series before it is full; of most networks there is no end."""
    if case.network is not smoother:
        return step
    model.num_samples = left = SERIES

    def counted() -> None:
        nonlocal left
        step()
        left -= 1
        if not left:
            model.smoother()
            left = SERIES

    return counted


def _arrays(case: Case) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(case.batch * case.inputs).astype(np.float32)
    y = rng.standard_normal(case.batch).astype(np.float32)
    return x, y, np.ones_like(y)


def _plain(case: Case) -> Callable[[], None]:
    """Return the engine's own step, without what this package adds to its updater."""
    model = case.network()
    model.set_threads(1)
    update = OutputUpdater("cpu")._cpp_backend.update
    x, y, noise = _arrays(case)

    def step() -> None:
        model(x)
        update(model.output_z_buffer, y.tolist(), noise.tolist(), model.input_delta_z_buffer)
        model.backward()
        model.step()

    return _counted(step, model, case)


def _four_calls(case: Case, way: Any) -> Callable[[], None]:
    model = accelerate(case.network(), way)
    model.set_threads(1)
    updater = OutputUpdater("cpu")
    x, y, noise = _arrays(case)

    def step() -> None:
        model(x)
        updater.update(model.output_z_buffer, y, noise, model.input_delta_z_buffer)
        model.backward()
        model.step()

    return _counted(step, model, case)


def _learn(case: Case, way: Any) -> Callable[[], None]:
    model = accelerate(case.network(), way)
    model.set_threads(1)
    x, y, noise = _arrays(case)

    def step() -> None:
        model.learn(x, y, noise)

    return _counted(step, model, case)
