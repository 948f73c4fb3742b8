"""Jobs in which one rank does something random at a random time: ``make chaos``.

``python tests/chaos/campaign.py --faults 1000 --first 0`` draws so many faults, each by its number,
runs them, and says which promises were broken: every rank ends, in a typed error that names the
culprit, or well; replicas are never silently different; a NaN changes nothing; nothing is left.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.faults import KINDS, Fault, Report, broken_promises
from chaos.forks import fork_ranks, lines, running
from chaos.rank import run
from support.rank_pool import free_port, worker_environment

from tagi_ddp.communicators.shm import rendezvous_name

RANK = Path(__file__).with_name("rank.py")
LIMIT = 30.0  # seconds, for all ranks of a job to end
BIN = Path(sys.executable).parent


def play(fault: Fault) -> tuple[list[str], str]:
    """Run a job with this fault; return the promises that were broken, and what the ranks said."""
    with tempfile.TemporaryDirectory(prefix="chaos.") as name:
        folder = Path(name)
        statuses = _fork(fault, folder) if fault.launcher == "fork" else _launch(fault, folder)
        reports = [_report(folder / f"{rank}.jsonl", statuses) for rank in range(fault.ranks)]
        left = [f"process {pid}" for pid in _running(folder)]
        names = Path("/proc/net/unix").read_text()
        left += ["a socket" for n in range(2) if rendezvous_name(f"{folder.name}/{n}") in names]
        return broken_promises(fault, reports, left), (folder / "output").read_text()


def _fork(fault: Fault, folder: Path) -> dict[int, int | None]:
    """Return the exit statuses, by process, of ranks that are forks of this one."""
    endpoint = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    spared = [fault.culprit] if fault.kind == "stop" else []
    return fork_ranks(fault.ranks, folder, partial(run, fault, folder), LIMIT, endpoint, spared)


def _launch(fault: Fault, folder: Path) -> dict[int, int | None]:
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    number = str(fault.ranks)
    launchers = {
        "tagi-ddp run": [BIN / "tagi-ddp", "run", "-n", number],
        "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", number],
        "mpirun": [BIN / "mpirun", *as_root, "--oversubscribe", "-n", number, sys.executable],
    }
    command = [*launchers[fault.launcher], RANK, folder, str(fault.seed)]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            env=worker_environment({"PYTHONPATH": str(RANK.parents[1])}),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        # A rank that is stopped is ended by the launcher once another one has failed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT)
        ended = process.returncode is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    pids = [_pid(path) for path in sorted(folder.glob("*.jsonl"))]
    return dict.fromkeys(pids, process.returncode if ended else None)


def _pid(path: Path) -> int:
    return next((line["pid"] for line in lines(path) if "pid" in line), 0)


def _report(path: Path, statuses: dict[int, int | None]) -> Report:
    report = Report(statuses.get(_pid(path)), {})
    for line in lines(path):
        if "step" in line:
            report.hashes[line["step"]] = line["hash"]
        if "refused" in line:
            report.refused += 1
            report.changed |= line["changed"]
        if "error" in line:
            report.error, report.text = line["error"], line["text"]
            report.blamed = tuple(line["blamed"])
    return report


def _running(folder: Path) -> list[int]:
    return running(map(_pid, folder.glob("*.jsonl")), 5)


def campaign(numbers: range) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Run the faults with these numbers; return how many by kind and backend, and what broke."""
    # What forks share: the modules of which a start takes most of its time.
    import pytagi.nn  # noqa: F401

    import tagi_ddp.communicators.network.rendezvous  # noqa: F401

    gc.freeze()
    os.environ["TAGI_DDP_SECRET"] = secrets.token_hex()
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures = []
    for number in numbers:
        fault = Fault.draw(number)
        if fault.launcher != "fork" and not shutil.which(fault.launcher.split()[0], path=BIN):
            continue
        broken, output = play(fault)
        counts[fault.kind, fault.backend] += 1
        if broken:
            failures.append(f"{fault}:\n  " + "\n  ".join(broken) + f"\n{output[-1500:]}")
            print(failures[-1], flush=True)
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=1000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--alone", action="store_true", help="nothing else uses /dev/shm")
    options = parser.parse_args()
    shared = set(os.listdir("/dev/shm"))
    start = time.monotonic()
    counts, failures = campaign(range(options.first, options.first + options.faults))
    backends = sorted({backend for _, backend in counts})
    print(f"| what one rank does | {' | '.join(backends)} |\n|---|{'---|' * len(backends)}")
    for kind in KINDS:
        print(f"| {kind} | {' | '.join(str(counts[kind, each]) for each in backends)} |")
    if options.alone and (left := set(os.listdir("/dev/shm")) - shared):
        failures.append(f"left in /dev/shm: {left}")
        print(failures[-1])
    total = sum(counts.values())
    print(f"{total} faults in {time.monotonic() - start:.0f} s; {len(failures)} broke a promise")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
