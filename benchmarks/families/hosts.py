"""Sums over emulated hosts of several ranks each; see `rows`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.emulated import NotPossible, bytes_out, emulated_hosts
from benchmarks.harness.measure import Contender, Figure, Missing, Row, measure
from benchmarks.harness.over_mpi import sums_over_mpi
from tagi_ddp import Communicator, init

COUNT = 540_000  # floats of a delta of 2.16 MB
FEW = 1000  # floats of a delta of 4 KB
LINKS = (20.0, 200.0, 1000.0, None)  # Mbit/s; None: no limit
HOSTS = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2))  # hosts, and ranks on each
Found = dict[str, tuple[Figure, float]]  # seconds of a sum, and bytes out of a host, by way
SLOWER = 1.1  # than the best other at most
FLOOR, DELTAS = 1.35, 1.05  # at most so many times the floor, and so many deltas out of a host


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(q) all_reduce of 2.16 MB over emulated hosts: ours over gloo and MPI, and their own.

    And of 4 KB where no link limits it. Ours in memory that the communicator gives, as it does for
    the deltas of a training.

    The floor is what a host has to send at least, at the rate of its link.
    """
    found: list[Row] = []
    cases = [((2, 2), 200.0)] if quick else [(h, link) for h in HOSTS for link in LINKS]
    for (hosts, ranks), mbit in cases:
        used = hosts * ranks
        part = communicator.split(0 if communicator.rank < used else None)
        if part is not None:
            with part:
                found += _measure(part, hosts, mbit, quick, scratch)
        communicator.barrier(timeout=1200)
    return found


def _measure(
    group: Communicator, hosts: int, mbit: float | None, quick: bool, scratch: Path
) -> list[Row]:
    link = "no limit" if mbit is None else f"{mbit:g} Mbit/s"
    place = f"{hosts} emulated hosts x {group.size // hosts} ranks, {link}"
    sizes = [COUNT // 10 if quick else COUNT, *([FEW] if mbit is None else [])]
    try:
        with emulated_hosts(group, hosts, mbit) as processes:
            return [
                row
                for size in sizes
                for network, found in _found(group, processes, mbit, quick, size, scratch).items()
                for row in _rows(f"{place}, over {network}", hosts, mbit, group.size, size, found)
            ]
    except NotPossible as error:
        return [Row(f"all_reduce, {place}", Missing(str(error)), Missing(str(error)), "ms", None)]


def _found(
    group: Communicator,
    processes: list[int],
    mbit: float | None,
    quick: bool,
    size: int,
    scratch: Path,
) -> dict[str, Found]:
    """Return what was measured of sums of ``size`` floats, by network."""
    slow = mbit is not None and mbit < 100
    rounds = 2 if quick else 5 if slow else 11
    calls = 20 if size == FEW else 1 if slow else 3
    with _ours(group, size) as ours, _torch(group, size) as gloo:
        ways = {"ours": ours, "its own": gloo}
        sent = {way: bytes_out(group, run) for way, run in ways.items()}
        contenders = [Contender(way, run, calls=calls) for way, run in ways.items()]
        times = measure(group, contenders, rounds)
    found = {"gloo": {way: (times[way], sent[way]) for way in ways}}
    if group.rank == 0:
        on_each = group.size // len(processes)
        with suppress(NotPossible):
            found["MPI"] = sums_over_mpi(processes, on_each, size, rounds, calls, scratch)
    group.barrier(timeout=1200)
    return found


def _rows(
    place: str, hosts: int, mbit: float | None, ranks: int, size: int, found: Found
) -> Iterator[Row]:
    name = f"all_reduce{' of 4 KB' if size == FEW else ''}, {place}"
    whole = 2 * (hosts - 1) / hosts  # deltas that a host has to send
    ours, other = (found[way][0].in_unit(1e3) for way in ("ours", "its own"))
    yield Row(f"{name}, against its own", ours, other, "ms", 1 / SLOWER)
    if mbit is not None:
        floor = Figure.single(1e3 * whole * 4 * size * 8 / (mbit * 1e6))
        target = 1 / FLOOR if (mbit, hosts, ranks) == (200.0, 2, 8) else None
        yield Row(f"{name}, against the floor", ours, floor, "ms", target)
    for way, target in (("ours", 1 / DELTAS), ("its own", None)):
        deltas = Figure.single(found[way][1] / (4 * size))
        yield Row(f"{name}, out of a host, {way}", deltas, Figure.single(whole), "deltas", target)


@contextmanager
def _ours(group: Communicator, size: int) -> Iterator[Callable[[], object]]:
    with init("gloo", group.rank, group.size, timeout=120) as network:
        array = network.empty(size)  # as training's deltas
        yield _checked(group, array, lambda: network.all_reduce(array))


@contextmanager
def _torch(group: Communicator, size: int) -> Iterator[Callable[[], object]]:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], 29501, group.size, group.rank == 0)
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    try:
        array = np.empty(size, np.float32)
        yield _checked(group, array, lambda: dist.all_reduce(torch.from_numpy(array)))
    finally:
        group.barrier(timeout=600)
        dist.destroy_process_group()


def _checked(
    group: Communicator, array: np.ndarray, run: Callable[[], object]
) -> Callable[[], object]:
    """Return what sums the array, of zeros, once it has been seen to sum."""
    array.fill(1.0 + group.rank)
    run()
    if not (array == group.size * (group.size + 1) / 2).all():
        raise RuntimeError("the sum is wrong")
    array.fill(0)
    return run
