"""The time until an elastic job goes on after a kill, or has a new rank; see `rows`.

``python -m benchmarks.families.elastic FOLDER WAY KIND RANKS HIDDEN`` is a rank of such a job.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.families.steps import backward_of
from benchmarks.harness.launch import ROOT, find_open_mpi
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.networks import INPUTS, mlp
from tagi_ddp import Communicator, DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import Checkpoints

BATCH = 16  # per rank
LIMIT = 120.0  # seconds for what follows a kill
LAUNCHER = [str(Path(sys.executable).with_name("tagi-ddp")), "run"]
# Of a new rank, between which of the times that it tells: see `main`.
_JOINING = {
    "has the posterior, since it came": ("came", "current"),
    "has made a step, since it came": ("came", "first"),
    "has made a step, since its process began": ("born", "first"),
}
RESTART = "restart"  # no elastic job: all ranks end, and start again from a checkpoint
KINDS: dict[str, dict[str, Any]] = {
    "sums": {"average": False},
    "merges": {"reduction": "precision", "sync_every": 4},
}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(s) from a kill to the others' next step, and from a new rank's coming to its first.

    Against all ranks' new start from a checkpoint, at 11 million parameters.
    """
    hidden, kills = (16, 1) if quick else (2944, 5)
    mpi = find_open_mpi()
    jobs = [(2, "shm", "sums"), (2, "gloo", "sums")]
    jobs += [(3, "mpi", "sums")]  # which cannot replace the ranks that it loses
    jobs += [(2, "shm", "merges"), (2, "gloo", "merges")]
    jobs += [(3, "shm", "merges"), (3, "gloo", "merges")]  # on two cores they wait for those
    found: list[Row] = []
    restarts: dict[int, Figure] = {}
    for ranks, way, kind in jobs[:3] if quick else jobs:
        if ranks not in restarts:
            restarts[ranks] = _seconds(RESTART, "sums", ranks, hidden, min(kills, 3))["next step"]
        name = f"{kind} over {way}, {ranks} ranks"
        if way == "mpi" and mpi is None:
            missing = Missing("Open MPI is not there")
            found.append(Row(f"{name}: next step", missing, restarts[ranks], "s", 1.0))
            continue
        figures = _seconds(way, kind, ranks, hidden, 2 if way == "mpi" else kills)
        for what, figure in figures.items():
            target = None if "process" in what else 1.0
            found.append(Row(f"{name}: {what}", figure, restarts[ranks], "s", target))
    return found


def _seconds(way: str, kind: str, ranks: int, hidden: int, kills: int) -> dict[str, Figure]:
    """Return what an event took, over so many kills in one job."""
    taken: dict[str, list[float]] = {"next step": []}
    if way not in ("mpi", RESTART):
        taken |= {f"a new rank {what}": [] for what in _JOINING}
    with tempfile.TemporaryDirectory(prefix="elastic.") as name:
        folder = Path(name)
        command = [sys.executable] if way == "mpi" else []
        launcher = [*LAUNCHER, "-n", str(ranks), "--max-restarts", str(kills)]
        if way == "mpi":
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            options = ["--oversubscribe", "--with-ft", "ulfm", "-n", str(ranks)]
            launcher = [str(find_open_mpi()), *root, *options]
        script = ["-m", "benchmarks.families.elastic", name, way, kind]
        script += [str(ranks), str(hidden)]
        with _running([*launcher, *command, *script], folder / "output") as job:
            for number in range(kills):
                there = ranks - number if way == "mpi" else ranks
                _await(job, partial(_ready, folder, way, there), "all ranks make steps")
                time.sleep(0.5)
                before = _steps(folder)
                victim = sorted(before)[number % len(before)]
                moment = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                (folder / f"{victim}.jsonl").unlink()
                _await_next(job, folder, way, before, victim, moment, ranks, taken)
            (folder / "over").touch()
            job.wait(LIMIT)
    return {what: Figure.of(seconds) for what, seconds in taken.items()}


def _ready(folder: Path, way: str, ranks: int) -> bool:
    saved = way != RESTART or (folder / "checkpoints" / "latest").exists()
    return saved and len(_steps(folder)) == ranks


def _await_next(
    job: subprocess.Popen[bytes],
    folder: Path,
    way: str,
    before: dict[int, dict[str, Any]],
    victim: int,
    moment: float,
    ranks: int,
    taken: dict[str, list[float]],
) -> None:
    """Wait until all go on after a kill, and put down how long it took."""
    if way == RESTART:
        for pid in before:
            (folder / f"{pid}.jsonl").unlink(missing_ok=True)
        _await(job, lambda: len(_steps(folder)) == ranks, "all ranks make steps again")
        taken["next step"].append(max(each["first"] for each in _steps(folder).values()) - moment)
        return
    survivors = before.keys() - {victim}

    def went_on() -> bool:
        now = _steps(folder)
        return all(now[pid]["group"] > before[pid]["group"] for pid in survivors)

    _await(job, went_on, "survivors go on")
    taken["next step"].append(max(_steps(folder)[pid]["first"] for pid in survivors) - moment)
    if way == "mpi":
        return
    _await(job, lambda: len(_steps(folder)) == ranks, "a new rank")
    (new,) = _steps(folder).keys() - survivors
    line = _steps(folder)[new]
    for what, (since, until) in _JOINING.items():
        taken[f"a new rank {what}"].append(line[until] - line[since])


@contextmanager
def _running(command: list[str], output: Path) -> Iterator[subprocess.Popen[bytes]]:
    inherited = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TAGI_DDP_", "OMPI_", "PMIX_", "PRTE_")
    clean = {name: each for name, each in os.environ.items() if not name.startswith(inherited)}
    with (
        open(output, "wb") as file,
        subprocess.Popen(command, cwd=ROOT, env=clean, stdout=file, stderr=file) as job,
    ):
        try:
            yield job
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {output.read_text()[-2000:]}") from None
        finally:
            job.terminate()
            with suppress(subprocess.TimeoutExpired):
                job.wait(10)
            job.kill()


def _await(job: subprocess.Popen[bytes], there: Any, what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not there():
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {LIMIT:g} s, or the job has ended")
        time.sleep(0.02)


def _steps(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what each process said of its last group."""
    found = {}
    for path in folder.glob("*.jsonl"):
        with suppress(FileNotFoundError):
            lines = path.read_text().rpartition("\n")[0].splitlines()
            if lines:
                found[int(path.stem)] = json.loads(lines[-1])
    return found


def main() -> None:
    """Train until there is a file "over", and tell of the first step in each group."""
    folder, way, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    ranks, hidden = int(sys.argv[4]), int(sys.argv[5])
    born = _began()
    elastic = way != RESTART
    config = DDPConfig.from_env(way if elastic else "shm")
    sampler = DistributedSampler(BATCH * ranks, 1, 0)
    with DDPSequential(mlp(hidden), config, elastic=elastic, **KINDS[kind]) as model:
        samples = np.random.default_rng(0).standard_normal((BATCH, INPUTS), np.float32)
        step = backward_of(model, samples)
        if not elastic:
            sampler.rank, sampler.num_replicas = model.communicator.rank, ranks
        with (
            Checkpoints(folder / "checkpoints", model) as checkpoints,
            open(folder / f"{os.getpid()}.jsonl", "w", buffering=1) as file,
        ):
            first = checkpoints.resume()
            steps = partial(model.steps, sampler) if elastic else sampler.steps
            told = 0
            for number, _ in steps(BATCH * ranks, 100_000, first):
                step()
                model.step()
                if number == first + 2 and not elastic:
                    checkpoints.save(number + 1)
                    checkpoints.wait()
                group = model.changes[-1].group if elastic and model.changes else 1
                if group > told:
                    times = {"first": time.monotonic(), "born": born, **_joining(model)}
                    file.write(json.dumps({"group": group, **times}) + "\n")
                    told = group
                if (folder / "over").exists():
                    os._exit(0)


def _joining(model: DDPSequential) -> dict[str, float]:
    """Return when a new rank was ready for the others, and had their posterior (monotonic time)."""
    if not (model.elastic and model.joined):
        return {}
    joining = model.changes[0]
    current = time.monotonic() - (time.time() - joining.time)
    return {"came": current - joining.seconds, "current": current}


def _began() -> float:
    """Return when this process was started, as time.monotonic() counts."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - uptime)


if __name__ == "__main__":
    main()
