"""What `tagi_ddp.plan` predicts, against steps over emulated hosts; see `rows`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytagi
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

from benchmarks.harness.emulated import NotPossible, emulated_hosts
from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import Communicator, DDPSequential, accelerate, init
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.plan import Cluster, Link, Training, measure_link, predict

WIDTHS = {10: 64, 100: 300, 500: 690}  # thousands of parameters, and the hidden layers of so many
INPUTS, BATCH = 16, 4
EVERY = 4  # steps from one merge to the next
SHAPES = ((1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (3, 1), (3, 2), (4, 1), (4, 2), (4, 4))
ERROR = 10.0  # percent, at most, on the mean
# Mbit/s and milliseconds of delay, and what runs there: size, shape, scheme.
CASES: dict[tuple[float | None, float], list[tuple[int, tuple[int, int], str]]] = {
    (20.0, 0.0): [
        (100, (2, 1), "sum"),
        (500, (2, 2), "sum"),
        (100, (4, 1), "sum"),
        (10, (4, 4), "sum"),
        (100, (3, 2), "sum"),
        (100, (2, 2), "precision"),
    ],
    (20.0, 50.0): [
        (10, (2, 1), "sum"),
        (100, (2, 2), "sum"),
        (500, (2, 4), "sum"),
        (100, (4, 1), "sum"),
        (10, (4, 2), "sum"),
        (500, (3, 1), "precision"),
    ],
    (200.0, 5.0): [
        (10, (2, 2), "sum"),
        (500, (2, 1), "sum"),
        (500, (2, 4), "sum"),
        (100, (3, 1), "sum"),
        (500, (4, 2), "sum"),
        (100, (4, 1), "precision"),
    ],
    (200.0, 0.0): [
        (100, (2, 1), "sum"),
        (500, (2, 4), "sum"),
        (500, (4, 1), "sum"),
        (500, (3, 2), "sum"),
        (500, (2, 2), "precision"),
    ],
    (1000.0, 1.0): [
        (500, (2, 1), "sum"),
        (500, (2, 2), "sum"),
        (500, (4, 2), "sum"),
        (500, (3, 1), "sum"),
        (500, (2, 2), "precision"),
    ],
    (None, 0.0): [
        (500, (1, 2), "sum"),
        (500, (1, 4), "sum"),
        (100, (2, 1), "sum"),
        (500, (2, 2), "sum"),
        (500, (4, 1), "sum"),
        (500, (1, 2), "precision"),
    ],
}


@dataclass(frozen=True)
class Measured:
    """One case: the seconds of a step."""

    name: str
    predicted: float
    seconds: float


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(t) steps on 1 to 4 emulated hosts of 1 to 4 ranks, predicted from two ranks' links.

    The link between hosts is measured by two hosts of one rank; that within a host, and the time of
    a step without communication, by as many ranks as the case has, as they share this machine.
    """
    links = list(CASES.items())
    try:
        found = [
            each
            for link, cases in (links[3:4] if quick else links)
            for each in _of_a_link(communicator, link, cases[:1] if quick else cases)
        ]
    except NotPossible as error:
        return [Row("predicted steps", Missing(str(error)), Missing(str(error)), "%", None)]
    off = [100 * abs(each.predicted / each.seconds - 1) for each in found]
    return [
        *(
            Row(
                f"{each.name}, measured against predicted",
                Figure.single(1e3 * each.seconds),
                Figure.single(1e3 * each.predicted),
                "ms",
                None,
            )
            for each in found
        ),
        Row(
            f"mean error of {len(off)} predictions, against {ERROR:g} %",
            Figure.single(float(np.mean(off))),
            Figure.single(ERROR),
            "%",
            1.0,
        ),
    ]


def _of_a_link(
    communicator: Communicator,
    link: tuple[float | None, float],
    cases: list[tuple[int, tuple[int, int], str]],
) -> Iterator[Measured]:
    mbit, delay = link
    where = f"{'no limit' if mbit is None else f'{mbit:g} Mbit/s'}, {delay:g} ms"
    sizes = sorted({8000 * thousand for thousand, *_ in cases} | {1 << 10})
    across = _on_hosts(communicator, (2, 1), link, lambda net, _: measure_link(net, sizes))
    for thousand, shape, scheme in cases:
        training, node, seconds = _on_hosts(
            communicator,
            shape,
            link,
            lambda net, host, t=thousand, s=scheme: _case(net, host, t, s),
        )
        cluster = Cluster(node, across, shape[1])
        predicted = predict(training, cluster, shape[0] * shape[1])[scheme]
        hosts = f"{shape[0]} x {shape[1]} ranks"
        yield Measured(
            f"{scheme}, {thousand},000 parameters, {hosts}, {where}", predicted, seconds
        )


def _on_hosts(
    communicator: Communicator, shape: tuple[int, int], link: tuple[float | None, float], run: Any
) -> Any:
    """Return what ``run(network, host)`` returns on rank 0 of so many hosts and ranks of each."""
    hosts, size = shape
    used = hosts * size
    part = communicator.split(0 if communicator.rank < used else None)
    result = None
    if part is not None:
        with part:
            host = part.split(part.rank // size)
            assert host is not None
            with host, _network(part, hosts, link) as network:
                result = run(network, host)
    return all_gather_object(communicator, result, timeout=1200)[0]


@contextmanager
def _network(
    part: Communicator, hosts: int, link: tuple[float | None, float]
) -> Iterator[Communicator]:
    if hosts == 1:
        yield part
        return
    with emulated_hosts(part, hosts, *link):
        with init("gloo", part.rank, part.size, timeout=120) as network:
            yield network


def _case(
    network: Communicator, host: Communicator, thousand: int, scheme: str
) -> tuple[Training, Link, float]:
    """Return what the plan asks for, and the seconds of a step; the same on all ranks."""
    width = WIDTHS[thousand]
    alone = accelerate(_mlp(width), compute="torch")
    alone.set_threads(1)
    options = {"average": False}
    if scheme == "precision":
        options = {"reduction": "precision", "sync_every": EVERY, "node_size": host.size}
    model = DDPSequential(_mlp(width), communicator=network, compute="torch", **options)
    model.set_threads(1)
    with model:
        step = _seconds(network, alone, 40)
        _seconds(network, model, 2)
        once = _seconds(network, model, EVERY)
        steps = EVERY * max(1, min(10, round(4.0 / (EVERY * once))))
        if scheme == "precision":
            model.merge()
            model._exchange._all_shares = 8 * EVERY  # as later, when merges are seldom
        seconds = _seconds(network, model, steps)
        parameters = model.num_parameters if hasattr(model, "num_parameters") else None
    size = sum(len(layer.mu_w) + len(layer.mu_b) for layer in model.model.layers[::2])
    del parameters
    node = Link(0.0, float("inf"))
    if host.size > 1:
        node = measure_link(host, [1 << 10, 8 * size // 4, 8 * size])
    merge = 0.0
    training = Training(step, size, sync_every=EVERY, merge=merge)
    return all_gather_object(network, (training, node, seconds))[0]


def _seconds(network: Communicator, model: Any, steps: int) -> float:
    """Return the seconds of a step, on the slowest rank."""
    rng = np.random.default_rng(network.rank)
    x = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
    y, var = np.zeros(BATCH, np.float32), np.ones(BATCH, np.float32)
    updater = OutputUpdater("cpu")
    network.barrier(timeout=600)
    start = time.perf_counter()
    for _ in range(steps):
        model(x)
        updater.update(model.output_z_buffer, y, var, model.input_delta_z_buffer)
        model.backward()
        model.step()
    spent = time.perf_counter() - start
    return float(max(all_gather_object(network, spent))) / steps


def _mlp(width: int) -> Sequential:
    pytagi.manual_seed(1)
    return Sequential(Linear(INPUTS, width), ReLU(), Linear(width, width), ReLU(), Linear(width, 1))
