"""Runs whose ranks are killed again and again: ``killed.py KIND FOLDER KILLS``.

Each run has a folder ``FOLDER/<number>`` and begins anew, from its last checkpoint, until it is at
its end; the first is left alone. ``FOLDER/answers`` has a line for each, of what it has learned.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from parallel.support import launched
from parallel.test_mixin import BATCH, Fit, data, settings, tagi_net
from support.networks import fresh

from checkpoint import runs
from checkpoint.test_parts import STEPS as DASO_STEPS
from checkpoint.test_parts import Training
from tagi_ddp import accelerate, init
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.parallel import CheckpointConfig, ParallelMixin

STEPS = 100
GRACE, FIRST = 3.0, 60.0  # seconds, beyond twice what a run takes; of the first at most
RANKS = {"schedule": 4, "in flight": 4, "DASO": 4}


def with_run(comm: Any, kind: str, path: Path) -> str:
    """Return what a network has learned that saves after each of its steps."""
    run = runs.Run(comm, kind, str(path))
    answer = run.go(range(1, STEPS + 1), STEPS)
    run.checkpoints.wait()
    return answer


def train_with_daso(comm: Any, path: Path) -> str:
    """Return what a torch module has learned, on each rank its own."""
    training = Training(comm, str(path))
    parts = training.run(training.checkpoints.resume(), DASO_STEPS)
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    return "-".join(all_gather_object(comm, digest))


def with_trainer(path: Path) -> str:
    """Return what the trainer has made of a network, with a checkpoint after every other step."""
    task, net = Fit(), tagi_net(norm=True)
    config = settings(str(path), checkpoint=CheckpointConfig(2, True))
    with ParallelMixin(config) as trainer:
        if (trainer.exp_dir / "checkpoints" / "latest").exists():
            trainer.load_checkpoint(task, net)
        trainer.train(task, net, data(), epochs=20, batch_size=BATCH)
        return str(trainer.task_model.model.check_replicas())


def rank_main(kind: str, rank: int, job: str, path: Path) -> None:
    """Train as a rank; rank 0 tells what it has learned."""
    ranks = RANKS.get(kind, 2)
    if kind == "trainer":
        with launched(rank, ranks, job):
            answer = with_trainer(path)
    else:
        comm = init("shm", rank, ranks, job=job, timeout=20)
        answer = train_with_daso(comm, path) if kind == "DASO" else with_run(comm, kind, path)
    if rank == 0:
        with open(path.parent / "answers", "a") as file:
            file.write(f"{answer}\n")
    os._exit(0)


def start(kind: str, path: Path) -> list[int]:
    """Start the ranks; return their processes."""
    job, ranks = secrets.token_hex(8), []
    for rank in range(RANKS.get(kind, 2)):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            try:
                rank_main(kind, rank, job, path)
            finally:
                os._exit(1)
    return ranks


def await_end(ranks: list[int], seconds: float) -> tuple[list[int], bool]:
    """Return who has not ended within so many seconds, and whether the others ended well."""
    deadline, well = time.monotonic() + seconds, True
    while ranks and time.monotonic() < deadline:
        found = {rank: os.waitpid(rank, os.WNOHANG) for rank in ranks}
        well &= not any(status for _, status in found.values())
        ranks = [rank for rank, (pid, _) in found.items() if pid == 0]
        time.sleep(0.01)
    return ranks, well


def main() -> None:
    """Kill one rank or all, at random times, until there were as many kills."""
    kind, folder, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    runs.EPOCHS = STEPS // runs.PER_EPOCH
    accelerate(fresh("mlp"))  # imports what ranks need
    draw = random.Random(kind)
    number, killed, anew = 0, 0, True
    whole = FIRST  # seconds of a run that nobody kills: the machine may be busier at times
    while killed < kills:
        begin, ranks = time.monotonic(), start(kind, folder / str(number))
        left, well = await_end(ranks, draw.uniform(0, whole) if number else whole)
        chosen = draw.choice([ranks, ranks, ranks[:1], ranks[1:]]) if number else []
        victims = set(left).intersection(chosen)
        for rank in victims:
            os.kill(rank, signal.SIGKILL)
        left, others_well = await_end(left, GRACE + 2 * whole)
        for rank in left:  # as launchers do with those that still wait for a lost one
            os.kill(rank, signal.SIGKILL)
        await_end(left, FIRST)
        if well and others_well and not left:
            whole = time.monotonic() - begin if anew else whole
            number, anew = number + 1, True
        elif victims:
            killed, anew = killed + 1, False
        else:
            sys.exit("a run of which nobody was killed has failed")


if __name__ == "__main__":
    main()
