"""Sums over emulated hosts by MPI: ours, and its own, in a job of mpirun's.

``python -m benchmarks.harness.over_mpi FLOATS ROUNDS CALLS`` is what its ranks run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from benchmarks.harness.emulated import NotPossible, address, bytes_out
from benchmarks.harness.launch import ROOT, find_open_mpi
from benchmarks.harness.measure import Contender, Figure, measure
from tagi_ddp import init

LIMIT = 600.0  # seconds
# Open MPI starts its daemons by this in place of ssh: on the host whose address comes first, which
# is the network of a process, under a name of its own. All ends with who starts it.
_AGENT = r"""#!/bin/sh
case $1 in {cases} esac
host=$1
shift
exec setpriv --pdeathsig KILL nsenter --net --target=$process unshare --uts --pid --kill-child \
    sh -c "hostname $host; $*"
"""


def sums_over_mpi(
    processes: Sequence[int], on_each: int, count: int, rounds: int, calls: int, scratch: Path
) -> dict[str, tuple[Figure, float]]:
    """Return seconds, and bytes out of host 0, of a sum of ``count`` floats: "ours" and "its own".

    Host i is the network of ``processes[i]``; the caller is on host 0. Raises NotPossible.
    """
    mpirun = find_open_mpi()
    if mpirun is None:
        raise NotPossible("there is no Open MPI")
    agent = scratch / "agent"
    cases = " ".join(f"{address(i)}) process={pid};;" for i, pid in enumerate(processes))
    agent.write_text(_AGENT.format(cases=cases))
    agent.chmod(0o700)
    hosts = ",".join(f"{address(i)}:{on_each}" for i in range(len(processes)))
    options = ["--host", hosts, "-n", str(len(processes) * on_each), "--bind-to", "none"]
    options += ["--map-by", f"ppr:{on_each}:node:OVERSUBSCRIBE", "--allow-run-as-root"]
    options += ["--prtemca", "plm_ssh_agent", str(agent), "--mca", "mpi_yield_when_idle", "1"]
    options += ["--mca", "btl_sm_backing_directory", str(scratch)]
    program = [
        sys.executable,
        "-m",
        "benchmarks.harness.over_mpi",
        *map(str, (count, rounds, calls)),
    ]
    job = ("OMPI_", "PMIX_", "PRTE_", "MASTER_", "TAGI_DDP_R", "TAGI_DDP_W")  # that of the caller
    environment = {name: value for name, value in os.environ.items() if not name.startswith(job)}
    # Its daemons meet in folders named by their process numbers: few, in namespaces of their own.
    environment["TMPDIR"] = mkdtemp(dir=scratch)
    done = subprocess.run(
        [agent, address(0), mpirun, *options, *program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"mpirun: status {done.returncode}: {done.stderr[-2000:]}")
    return {
        way: (Figure(*seconds), sent)
        for way, (seconds, sent) in json.loads(done.stdout.splitlines()[-1]).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("floats", "rounds", "calls"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    from mpi4py import MPI

    with init("mpi", timeout=LIMIT) as group:
        own, shared = np.zeros(options.floats, np.float32), group.empty(options.floats)
        ways = {
            "ours": lambda: group.all_reduce(shared),
            "its own": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, own),
        }
        sent = {way: bytes_out(group, run) for way, run in ways.items()}
        contenders = [Contender(way, run, calls=options.calls) for way, run in ways.items()]
        times = measure(group, contenders, options.rounds)
        if group.rank == 0:
            print(json.dumps({way: (astuple(times[way]), sent[way]) for way in ways}), flush=True)


if __name__ == "__main__":
    main()
