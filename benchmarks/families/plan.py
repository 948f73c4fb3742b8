"""The predictions of `tagi_ddp.plan`, against steps over emulated hosts; see `rows`."""

from __future__ import annotations

import gc
import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytagi
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

from benchmarks.harness.emulated import NotPossible, emulated_hosts
from benchmarks.harness.launch import ROOT
from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import Communicator, DDPSequential, accelerate, init
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.shm import create
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.plan import Cluster, Link, Training, measure_link, memory, predict
from tagi_ddp.update.consensus import Consensus

WIDTHS = {10: 64, 100: 300, 500: 690}  # thousands of parameters, and the hidden layers of so many
INPUTS, BATCH = 16, 4
EVERY = 4  # steps from one merge to the next
ERROR = 10.0  # percent, at most, on the mean
Network = tuple[float | None, float]  # Mbit/s, None: no limit; milliseconds of delay
Size = tuple[int, int, int]  # thousands of parameters, hosts, ranks of each
# Of each link the steps that sum, and one that merges now and then.
CASES: dict[Network, tuple[list[Size], Size]] = {
    (20.0, 0.0): (
        [(100, 2, 1), (500, 2, 2), (100, 4, 1), (10, 4, 4), (100, 3, 2)],
        (100, 2, 2),
    ),
    (20.0, 50.0): (
        [(10, 2, 1), (100, 2, 2), (500, 2, 4), (100, 4, 1), (10, 4, 2)],
        (500, 3, 1),
    ),
    (200.0, 5.0): (
        [(10, 2, 2), (500, 2, 1), (500, 2, 4), (100, 3, 1), (500, 4, 2)],
        (100, 4, 1),
    ),
    (200.0, 0.0): ([(100, 2, 1), (500, 2, 4), (500, 4, 1), (500, 3, 2)], (500, 2, 2)),
    (1000.0, 0.0): ([(500, 2, 1), (500, 2, 2), (500, 4, 2), (500, 3, 1)], (500, 2, 2)),
    (None, 0.0): (
        [(500, 1, 2), (500, 1, 4), (100, 2, 1), (500, 2, 2), (500, 4, 1)],
        (500, 1, 2),
    ),
}


@dataclass(frozen=True)
class Measured:
    """One case: the seconds of a step. On ``slow`` links these take more time than the cores."""

    name: str
    slow: bool
    predicted: float
    seconds: float


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(t) steps on 1 to 4 emulated hosts of 1 to 4 ranks, and the memory of a rank.

    The link between hosts is measured by one rank of each. As all hosts share this machine's
    cores, that within a host is measured while the others' are, and so are a step without
    communication and the arithmetic of a merge.
    """
    held = _memory(communicator, 64 if quick else 2000)
    cases = {
        link: [*((size, "sum") for size in sums), (merge, "precision")]
        for link, (sums, merge) in CASES.items()
    }
    if quick:
        cases = {(200.0, 0.0): cases[200.0, 0.0][:1]}
    try:
        found = [
            each for link, steps in cases.items() for each in _of_a_link(communicator, link, steps)
        ]
    except NotPossible as error:
        return [*held, Row("predicted steps", Missing(str(error)), Missing(str(error)), "%", None)]
    return [
        *held,
        *(_compared(each.name, 1e3 * each.seconds, 1e3 * each.predicted, "ms") for each in found),
        _error([each for each in found if each.slow], "where links have at most 200 Mbit/s"),
        _error(found, "of all"),
    ]


def _error(found: list[Measured], which: str) -> Row:
    off = float(np.mean([100 * abs(each.predicted / each.seconds - 1) for each in found]))
    name = f"mean error of {len(found)} predictions, {which}, against {ERROR:g} %"
    return Row(name, Figure.single(off), Figure.single(ERROR), "%", 1.0)


def _compared(name: str, measured: float, predicted: float, unit: str) -> Row:
    figures = (Figure.single(value) for value in (measured, predicted))
    return Row(f"{name}, measured against predicted", *figures, unit, None)


def _memory(communicator: Communicator, width: int) -> list[Row]:
    """Return what ranks of one host hold, which are taken for nodes of ``node_size``."""
    found = []
    cases: list[tuple[int, int, dict[str, Any]]] = [
        (2, 2, {}),
        (2, 2, {"reduction": "precision"}),
        (2, 1, {"reduction": "precision"}),
        (4, 2, {"reduction": "precision"}),
        (2, 1, {"reduction": "precision", "compress": "int8"}),
    ]
    for ranks, node_size, options in cases:
        scheme = options.get("reduction", "sum")
        if options:
            options |= {"sync_every": EVERY, "node_size": node_size}
        told = _held(ranks, width, options) if communicator.rank == 0 else None
        communicator.barrier(timeout=600)
        parameters, held = all_gather_object(communicator, told)[0]
        training = Training(1.0, parameters, bits=8 if "compress" in options else 32)
        cluster = Cluster(Link(0.0, math.inf), Link(0.0, math.inf), node_size)
        predicted = memory(training, cluster, ranks, scheme)
        what = f"{scheme}, {ranks // node_size} nodes of {node_size}, {training.bits} bits"
        found.append(_compared(f"memory of a rank, {what}", held / 1e6, predicted / 1e6, "MB"))
    return found


def _held(ranks: int, width: int, options: dict[str, Any]) -> list[int]:
    """Return the parameters, and the bytes that new processes hold after some steps."""
    launchers = ("OMPI_", "PMI", "TAGI_DDP_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    module = ["-m", "benchmarks.families.plan", str(width), json.dumps(options)]
    output = subprocess.check_output(
        [sys.executable, "-m", "tagi_ddp", "run", "-n", str(ranks), *module],
        cwd=ROOT,
        env=environment,
        text=True,
        timeout=200,
    )
    [told] = [line for line in output.splitlines() if line.startswith("[0] ")]
    return list(json.loads(told.removeprefix("[0] ")))


def main() -> None:
    """Print what `_held` returns, on rank 0."""
    width, options = int(sys.argv[1]), json.loads(sys.argv[2])
    with init(timeout=120) as comm:
        for size in (32, width):  # libraries load what they need at the first steps
            before = _resident()
            with DDPSequential(_mlp(size), communicator=comm, compute="torch", **options) as model:
                _seconds(comm, model, 2)
                gc.collect()
                held = _resident() - before
                comm.barrier()
        if comm.rank == 0:
            print(json.dumps([_parameters(model), held]))


def _resident() -> int:
    """Return this process's proportional share of memory, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    [share] = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return 1024 * int(share)


def _of_a_link(
    communicator: Communicator, link: Network, cases: list[tuple[Size, str]]
) -> Iterator[Measured]:
    mbit, delay = link
    where = f"{'no limit' if mbit is None else f'{mbit:g} Mbit/s'}, {delay:g} ms"
    sent = {8000 * thousand for (thousand, *_), _ in cases}
    # Two great ones at least: a small sum that was held up would hide the bandwidth of one.
    sizes = sorted({1 << 10, min(sent) // 2} | sent)
    across = {
        hosts: _as_link(_on_hosts(communicator, (hosts, 1), link, lambda net, _: _link(net, sizes)))
        for hosts in sorted({hosts for (_, hosts, _), _ in cases} - {1})
    }
    for (thousand, hosts, ranks), scheme in cases:
        step, merge, parameters, seconds = _on_hosts(
            communicator,
            (hosts, ranks),
            link,
            lambda net, part, t=thousand, n=ranks, s=scheme: _case(net, part, t, n, s),
        )
        training = Training(step, parameters, sync_every=EVERY, merge=merge)
        node = Link(0.0, math.inf)
        if ranks > 1:
            node = _as_link(
                _with(communicator, hosts * ranks, lambda part, n=ranks: _node(part, n, sizes))
            )
        cluster = Cluster(node, across.get(hosts, node), ranks)
        predicted = predict(training, cluster, hosts * ranks)[scheme]
        name = f"{scheme}, {thousand},000 parameters, {hosts} x {ranks} ranks, {where}"
        yield Measured(name, mbit is not None and mbit <= 200, predicted, seconds)


def _on_hosts(communicator: Communicator, shape: tuple[int, int], link: Network, run: Any) -> Any:
    """Return what ``run(network, part)`` returns on rank 0 of so many hosts and ranks of each.

    ``part`` joins the same ranks by this machine's memory.
    """
    hosts, size = shape

    def on_network(part: Communicator) -> Any:
        with _network(part, hosts, link) as network:
            return run(network, part)

    return _with(communicator, hosts * size, on_network)


def _with(communicator: Communicator, ranks: int, run: Any) -> Any:
    """Return what ``run(part)`` returns on rank 0 of so many."""
    part = communicator.split(0 if communicator.rank < ranks else None)
    result = None
    if part is not None:
        with part:
            result = run(part)
    communicator.barrier(timeout=1200)
    return all_gather_object(communicator, result)[0]


def _node(part: Communicator, size: int, sizes: Sequence[int]) -> list[Any]:
    """Return what connects the ranks of a host, while those of all hosts use what connects them."""
    if part.size == size:
        return _link(part, sizes)
    tokens = all_gather_object(part, secrets.token_hex(16))
    first = part.rank - part.rank % size
    with create(part.rank - first, size, tokens[first], 120.0, spin=False) as host:
        return _link(host, sizes)


@contextmanager
def _network(part: Communicator, hosts: int, link: Network) -> Iterator[Communicator]:
    if hosts == 1:
        yield part
        return
    with (
        emulated_hosts(part, hosts, *link),
        init("gloo", part.rank, part.size, timeout=120) as network,
    ):
        yield network


def _case(
    network: Communicator, part: Communicator, thousand: int, node_size: int, scheme: str
) -> tuple[float, float, int, float]:
    """Return a step's and a merge's seconds, the parameters, and the seconds of a step together.

    A step's without communication, until the slowest rank has done it, or as many as lie between
    merges: these ranks share cores, and who waits for all waits for that one. A merge's arithmetic
    for each byte.
    """
    width = WIDTHS[thousand]
    alone = accelerate(_mlp(width), compute="torch")
    options: dict[str, Any] = {"average": False}
    if scheme == "precision":
        options = {"reduction": "precision", "sync_every": EVERY, "node_size": node_size}
    model = DDPSequential(_mlp(width), communicator=network, compute="torch", **options)
    with model:
        for each in (alone, model):
            each.set_threads(1)
        apart = 1 if scheme == "sum" else EVERY
        _seconds(network, alone, 3)
        step = _seconds(network, alone, 10, part, apart)
        merge = _arithmetic(network, alone) if scheme == "precision" else 0.0
        once = _seconds(network, model, 1)
        if scheme == "precision":
            model._ranks.exchange._all_shares = 8 * EVERY  # as later, when merges are seldom
        seconds = _seconds(network, model, max(1, min(15, round(1 / once))))
    return step, merge, _parameters(model), seconds


def _arithmetic(network: Communicator, model: DDPSequential) -> float:
    """Return the seconds of a merge's arithmetic for each byte, while all ranks do it."""
    replica = model._local.replica
    consensus, now = Consensus(SingleCommunicator(), replica, True, None), replica.zeros()
    change = replica.on_host.change_since
    add = replica.on_host.add_change

    def merge() -> None:
        replica.parameters.read_posterior(now)
        change(now, consensus.gaussians, consensus.change)
        consensus.start().wait()
        consensus.agree()
        add(consensus.gaussians, consensus.gaussians, consensus.change)
        replica.parameters.write_posterior(consensus.gaussians)

    merge()
    network.barrier(timeout=600)
    start = time.perf_counter()
    for _ in range(10):
        merge()
    spent = time.perf_counter() - start
    return float(max(all_gather_object(network, spent))) / 10 / consensus.change.nbytes


def _parameters(model: DDPSequential) -> int:
    return sum(len(layer.mu_w) + len(layer.mu_b) for layer in model.model.layers)


def _link(communicator: Communicator, sizes: Sequence[int]) -> list[Any]:
    return list(astuple(measure_link(communicator, sizes)))


def _as_link(told: list[Any]) -> Link:
    latency, bandwidth, sums, ranks, vote = told
    pairs = tuple((size, seconds) for size, seconds in sums)
    return Link(latency, bandwidth, pairs, ranks, vote)


def _seconds(
    network: Communicator,
    model: Any,
    blocks: int,
    part: Communicator | None = None,
    apart: int = 1,
) -> float:
    """Return the seconds of a step, the median over blocks of `EVERY`, on the slowest rank.

    Ranks of a ``part`` wait for each other every so many steps.
    """
    rng = np.random.default_rng(network.rank)
    x = rng.normal(size=(BATCH, INPUTS)).astype(np.float32)
    y, var = np.zeros(BATCH, np.float32), np.ones(BATCH, np.float32)
    updater = OutputUpdater("cpu")
    network.barrier(timeout=600)
    spent = []
    for _ in range(blocks):
        start = time.perf_counter()
        for i in range(EVERY):
            if part is not None and i % apart == 0:
                part.barrier()
            model(x)
            updater.update(model.output_z_buffer, y, var, model.input_delta_z_buffer)
            model.backward()
            model.step()
        if part is not None:
            part.barrier()
        spent.append((time.perf_counter() - start) / EVERY)
    return float(max(all_gather_object(network, float(np.median(spent)))))


def _mlp(width: int) -> Sequential:
    pytagi.manual_seed(1)
    return Sequential(Linear(INPUTS, width), ReLU(), Linear(width, width), ReLU(), Linear(width, 1))


if __name__ == "__main__":
    main()
