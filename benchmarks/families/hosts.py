"""Sums over emulated hosts of several ranks each; see `rows`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.emulated import NotPossible, bytes_sent, emulated_hosts
from benchmarks.harness.measure import Contender, Figure, Missing, Row, measure
from tagi_ddp import Communicator, init

COUNT = 540_000  # floats of a delta of 2.16 MB
LINKS = (20.0, 200.0, 1000.0, None)  # Mbit/s; None: no limit
HOSTS = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2))  # hosts, and ranks on each
SLOWER = 1.1  # than the best other at most
FLOOR, DELTAS = 1.35, 1.05  # at most so many times the floor, and so many deltas out of a host


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(q) all_reduce of 2.16 MB over emulated hosts: ours over gloo against torch's gloo.

    The floor is what a host has to send at least, at the rate of its link.
    """
    found: list[Row] = []
    cases = [((2, 2), 200.0)] if quick else [(h, link) for h in HOSTS for link in LINKS]
    for (hosts, ranks), mbit in cases:
        used = hosts * ranks
        part = communicator.split(0 if communicator.rank < used else None)
        if part is not None:
            with part:
                found += _measure(part, hosts, mbit, quick)
        communicator.barrier(timeout=1200)
    return found


def _measure(group: Communicator, hosts: int, mbit: float | None, quick: bool) -> list[Row]:
    link = "no limit" if mbit is None else f"{mbit:g} Mbit/s"
    name = f"all_reduce, {hosts} emulated hosts x {group.size // hosts} ranks, {link}"
    size = COUNT // 10 if quick else COUNT
    try:
        with emulated_hosts(group, hosts, mbit), ExitStack() as stack:
            ways = {
                "ours": stack.enter_context(_ours(group, size)),
                "gloo": stack.enter_context(_torch(group, size)),
            }
            sent = {way: _bytes_out(group, run) / (4 * size) for way, run in ways.items()}
            slow = mbit is not None and mbit < 100
            contenders = [Contender(way, run, calls=1 if slow else 3) for way, run in ways.items()]
            times = measure(group, contenders, 2 if quick else 5 if slow else 11)
    except NotPossible as error:
        return [Row(name, Missing(str(error)), Missing(str(error)), "ms", None)]
    ours, gloo = (times[way].in_unit(1e3) for way in ("ours", "gloo"))
    whole = 2 * (hosts - 1) / hosts  # deltas that a host has to send
    found = [Row(f"{name}, against torch's gloo", ours, gloo, "ms", 1 / SLOWER)]
    if mbit is not None:
        least = whole * 4 * size * 8 / (mbit * 1e6)
        target = 1 / FLOOR if (mbit, hosts, group.size) == (200.0, 2, 8) else None
        found.append(
            Row(f"{name}, against the floor", ours, Figure.single(1e3 * least), "ms", target)
        )
    for way, title, target in (("ours", "", 1 / DELTAS), ("gloo", ", by torch's gloo", None)):
        row = f"{name}, out of a host{title}"
        figures = (Figure.single(deltas) for deltas in (sent[way], whole))
        found.append(Row(row, *figures, "deltas", target))
    return found


@contextmanager
def _ours(group: Communicator, size: int) -> Iterator[Callable[[], object]]:
    with init("gloo", group.rank, group.size, timeout=120) as network:
        yield _checked(group, size, lambda array: network.all_reduce(array))


@contextmanager
def _torch(group: Communicator, size: int) -> Iterator[Callable[[], object]]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], 29501, group.size, group.rank == 0)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        yield _checked(group, size, lambda array: dist.all_reduce(torch.from_numpy(array)))
    finally:
        group.barrier(timeout=600)
        dist.destroy_process_group()


def _checked(
    group: Communicator, size: int, run: Callable[[np.ndarray], object]
) -> Callable[[], object]:
    """Return what sums zeros, once it has been seen to sum."""
    array = np.full(size, 1.0 + group.rank, np.float32)
    run(array)
    if not (array == group.size * (group.size + 1) / 2).all():
        raise RuntimeError("the sum is wrong")
    array.fill(0)
    return lambda: run(array)


def _bytes_out(group: Communicator, run: Callable[[], object]) -> float:
    """Return how many bytes leave this host for a sum."""
    calls = 5
    group.barrier(timeout=600)
    before = bytes_sent()
    for _ in range(calls):
        run()
    group.barrier(timeout=600)
    time.sleep(0.2)  # acknowledgements
    return (bytes_sent() - before) / calls
