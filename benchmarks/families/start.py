"""The cost of a start of many ranks on one machine, and the time to hear of a death; see `rows`.

``python -m benchmarks.families.start shm 256`` measures one way at one size.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.harness.launch import ROOT
from benchmarks.harness.measure import Figure, Row
from tagi_ddp import Communicator, PeerLost, init

LIMIT = 200.0  # seconds
WAYS = ("gloo", "shm", "torch")
UNITS = {"start": "s", "sockets of a rank": "", "memory of a rank": "MB"}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(s) from the first call to a first sum, of 64 ranks, against torch's own gloo.

    The processes are forked when all is imported. Sockets are those that a rank has more than
    before, memory its proportional share of what is resident.
    """
    ranks = 4 if quick else 64
    figures = {who: measure(who, ranks) for who in WAYS}
    return [
        Row(
            f"{what}, {ranks} ranks over {way}, against torch's gloo",
            Figure.single(figures[way][what]),
            Figure.single(figures["torch"][what]),
            unit,
            None,
        )
        for way in ("gloo", "shm")
        for what, unit in UNITS.items()
        if figures[way][what]  # shared memory has no sockets
    ]


def measure(way: str, ranks: int) -> dict[str, float]:
    """Return the medians over the ranks, in a process of its own that forks them."""
    command = [sys.executable, "-m", "benchmarks.families.start", way, str(ranks)]
    found: dict[str, float] = json.loads(
        subprocess.check_output(command, cwd=ROOT, timeout=1.5 * LIMIT)
    )
    return found


def main() -> None:
    """Print the medians as JSON; "death" is the seconds until the last rank has heard of one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("ranks", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 10_000)}
    os.environ.update({"TAGI_DDP_SECRET": "bench", **place})
    pipes = []
    for rank in range(options.ranks):
        source, target = os.pipe()
        if os.fork() == 0:
            status = 1
            try:
                with os.fdopen(target, "w") as out:
                    out.write(json.dumps(take_part(options.way, rank, options.ranks)))
                status = 0
            finally:
                os._exit(status)
        os.close(target)
        pipes.append(source)
    told = []
    for source in pipes:
        with os.fdopen(source) as stream:
            told.append(stream.read())
    answers = [json.loads(text) for text in told if text]
    if len(answers) < options.ranks - 1:
        sys.exit(f"{options.ranks - len(answers)} of {options.ranks} ranks ended with an error")
    result = {what: statistics.median(a[what] for a in answers) for what in UNITS}
    if options.way != "torch":
        result["death"] = max(answer["heard"] for answer in answers) - answers[0]["died"]
    print(json.dumps(result))


def take_part(way: str, rank: int, ranks: int) -> dict[str, float]:
    """Start, add up, and, over ours, wait for a rank that is killed."""
    before, began = _sockets(), time.monotonic()
    if way == "torch":
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
        dist.all_reduce(torch.ones(1000))
        found = {"start": time.monotonic() - began, **_resources(before)}
        dist.barrier()
        return found
    comm = init(way, rank, ranks, job=f"start {os.getppid()}", timeout=LIMIT)
    comm.all_reduce(np.ones(1000, np.float32))
    found = {"start": time.monotonic() - began, **_resources(before)}
    times = np.zeros(1)
    victim = ranks - 1
    comm.barrier()
    if rank == victim:
        times[0] = time.monotonic() + 1.0
    comm.broadcast(times, victim)
    if rank == victim:
        time.sleep(max(0.0, times[0] - time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with suppress(PeerLost):
        comm.barrier()
    return {**found, "died": float(times[0]), "heard": time.monotonic()}


def _sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the folder that was read
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


def _resources(sockets_before: int) -> dict[str, float]:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    share = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return {
        "sockets of a rank": float(_sockets() - sockets_before),
        "memory of a rank": 1024e-6 * share,
    }


if __name__ == "__main__":
    main()
