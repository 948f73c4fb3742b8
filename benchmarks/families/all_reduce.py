"""all_reduce of float32; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import Contender, Missing, Row, measure
from benchmarks.harness.peers import open_gloo, open_mpi
from tagi_ddp import Communicator
from tagi_ddp.communicators import as_communicator

# Of one rank's buffer: floats, calls in a sample. 88 MB are both deltas of 11 million parameters.
SIZES = {"4 KB": (1024, 200), "4 MB": (1 << 20, 10), "88 MB": (22_000_000, 1)}
# By number of ranks and alternative, for each size.
TARGETS = {
    (2, "mpi4py"): {"4 KB": 1.0, "4 MB": 1.5, "88 MB": 1.5},
    (2, "gloo"): {"4 KB": 2.0, "4 MB": 2.0, "88 MB": 2.0},
    (4, "mpi4py"): {"4 KB": 1.0, "4 MB": 1.0, "88 MB": 1.0},
}
OURS = "own memory"
PRIVATE = "private"
OVER_GLOO = "over gloo"
PAIRS = ((OURS, "mpi4py"), (OURS, "gloo"), (PRIVATE, "mpi4py"), (OVER_GLOO, "gloo"))


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(c) shm in the communicator's own memory against mpi4py in place, and against gloo.

    And a communicator over gloo, whose ranks share a host, against torch's.
    """
    mpi, gloo = open_mpi(), open_gloo(communicator, scratch)
    network = None
    if not isinstance(gloo, Missing):
        network = as_communicator(gloo.group.WORLD)
    sizes = {"40 B": (10, 2)} if quick else SIZES
    rounds = 2 if quick else 21
    found = []
    for size, (count, calls) in sizes.items():
        ways = _ways(communicator, mpi, gloo, network, count)
        contenders = [Contender(name, run, calls=calls) for name, run in ways.items()]
        figures = {
            name: figure.in_unit(1e6)
            for name, figure in measure(communicator, contenders, rounds).items()
        }
        for ours, other in PAIRS:
            missing = {"mpi4py": mpi, "gloo": gloo}[other]
            targets = TARGETS.get((communicator.size, other), {})
            found.append(
                Row(
                    f"all_reduce, {communicator.size} ranks, {size}, {ours}, against {other}",
                    figures.get(ours, missing),
                    missing if isinstance(missing, Missing) else figures[other],
                    "us",
                    None if ours == PRIVATE else targets.get(size),
                )
            )
    if network is not None:
        network.close()
        gloo.destroy_process_group()
    return found


def _ways(
    communicator: Communicator,
    mpi: Any | Missing,
    gloo: Any | Missing,
    network: Communicator | None,
    count: int,
) -> dict[str, Callable[[], object]]:
    """Return the ways to sum ``count`` floats over the ranks in place, each with its own buffer.

    Each has been seen to sum. The buffers hold zeros, which stay zeros however often.
    """
    ways: dict[str, Callable[[], object]] = {}

    def add(name: str, buffer: np.ndarray, run: Callable[[], object]) -> None:
        buffer.fill(1 + communicator.rank)
        run()
        if not (buffer == communicator.size * (communicator.size + 1) / 2).all():
            raise RuntimeError(f"{name} did not sum over the ranks")
        buffer.fill(0)
        ways[name] = run

    own = communicator.empty(count)
    add(OURS, own, lambda: communicator.all_reduce(own))
    if not isinstance(mpi, Missing):
        theirs = _floats(count)
        add("mpi4py", theirs, lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, theirs))
    if not isinstance(gloo, Missing):
        import torch

        array = _floats(count)
        tensor = torch.from_numpy(array)
        add("gloo", array, lambda: gloo.all_reduce(tensor))
    if network is not None:
        given = _floats(count)
        add(OVER_GLOO, given, lambda: network.all_reduce(given))
    private = _floats(count)
    add(PRIVATE, private, lambda: communicator.all_reduce(private))
    return ways


def _floats(count: int) -> np.ndarray:
    """Return ``count`` floats in huge pages, where the system has them, from the first to the last.

    mpi4py is twice as fast there at 4 MB, and where numpy puts an array is up to chance.
    """
    huge = 2 << 20
    memory = np.empty(4 * count + 2 * huge, np.uint8)
    begin = -memory.ctypes.data % huge
    return memory[begin : begin + 4 * count].view(np.float32)
