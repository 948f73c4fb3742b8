"""Training throughput, compute by the engine; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pytagi.nn import Sequential

from benchmarks.harness.measure import Contender, Row, measure
from benchmarks.harness.networks import INPUTS, mlp, require_equal
from benchmarks.harness.work import data, trainer
from tagi_ddp import Communicator, DDPSequential, init

HIDDEN = 128
THREADS = (1, 2, 4)  # of pytagi in one process


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(d) 2 ranks of 1 thread against pytagi in 1 process on the same batch, and against 1 rank.

    All do whole steps: forward, output update, backward, step. The 1 rank trains on half the batch,
    so that each of the 2 has as much to do as it.
    """
    batch, rounds = (16, 2) if quick else (1024, 21)
    size = communicator.size
    share = batch // size
    begin = communicator.rank * share
    samples, labels = data(INPUTS, batch)

    def train_on(model: Sequential | DDPSequential, part: slice) -> Callable[[], None]:
        return trainer(model, samples[part], labels[part])

    # The first network of a process was a few percent slower than later ones, we do not know why:
    # it is one that is not measured.
    train_on(_network(1), slice(batch))()
    ours, one = _network(1), _network(1)
    alone = {threads: _network(threads) for threads in THREADS}
    group = DDPSequential(ours, average=False, communicator=communicator, compute="engine")
    single = DDPSequential(one, average=False, communicator=init("shm", 0, 1), compute="engine")
    contenders = [Contender("ours", train_on(group, slice(begin, begin + share)))]
    contenders += [
        Contender(f"{threads} threads", train_on(network, slice(batch)), alone=True)
        for threads, network in alone.items()
    ]
    contenders.append(Contender("1 rank", train_on(single, slice(share)), alone=True))

    for contender in contenders[:2]:
        if communicator.rank == 0 or not contender.alone:
            contender.run()
    if communicator.rank == 0:
        require_equal(ours, alone[THREADS[0]], _network(1))

    times = measure(communicator, contenders, rounds)
    best = min((times[f"{threads} threads"] for threads in THREADS), key=lambda t: t.median)
    name = f"training, {size} ranks, batch {batch}, against"
    throughput = times["ours"].rate(batch)
    return [
        Row(
            f"{name} pytagi, best of {THREADS} threads",
            throughput,
            best.rate(batch),
            "samples/s",
            1.2,
        ),
        Row(
            f"{name} 1 rank, batch {share}",
            throughput,
            times["1 rank"].rate(share),
            "samples/s",
            1.9,
        ),
    ]


def _network(threads: int) -> Sequential:
    network = mlp(HIDDEN)
    network.set_threads(threads)
    return network
