"""Elastic jobs in which a rank is killed at one of its collective calls: a part of ``make chaos``.

``python tests/chaos/every_call.py --jobs 100 --first 0`` runs so many jobs of three ranks, each of
which goes on from a checkpoint. One rank is killed before, in or behind a call that is drawn: while
the group is made, in `Checkpoints()`, `resume`, a step, a save or a call of the script's own.
Another rank takes its place. All must end well after all steps, with equal replicas, and sums as
one process makes them; no checkpoint may hold another number of steps than it says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from chaos.checkpointed import false_checkpoints, read_lines, saved_states, train
from support.networks import NETWORKS, SIGMA_V, fresh

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.communicators.base import BaseCommunicator
from tagi_ddp.communicators.shm import ShmCommunicator
from tagi_ddp.sequential.run_state import named_parameters

RANKS, SAMPLES, BATCH, BEGIN = 3, 112, 8, 4
STEPS = SAMPLES // BATCH
LIMIT = 60.0  # seconds of a job
JOINS = {"shm": 0.06, "gloo": 0.25}  # seconds of a step while a new rank may still join
SUMS: dict[str, Any] = {"average": False}
MERGES: dict[str, Any] = {"reduction": "precision", "sync_every": 3}


@dataclass(frozen=True)
class Kill:
    """The kill of one job: of ``rank``, before, in or behind its call number ``call``."""

    rank: int
    call: int
    when: str
    backend: str
    merges: bool
    every: int

    @classmethod
    def draw(cls, seed: int) -> Kill:
        """Return the kill with this number, always the same."""
        dice = random.Random(seed)
        return cls(
            dice.randrange(RANKS),
            dice.randrange(90),
            dice.choice(["before", "in", "behind"]),
            dice.choice(["shm", "shm", "gloo"]),
            dice.random() < 0.3,
            dice.choice([1, 2, 3]),
        )


def die_at(kill: Kill, folder: Path) -> None:
    """Make this process kill itself at the call of ``kill``, unless it replaces a killed rank."""
    killed = folder / "killed"
    if os.environ["RANK"] != str(kill.rank) or killed.exists():
        return
    calls = iter(range(kill.call + 1))

    def counted(operation: Any) -> Any:
        def call(communicator: Any, *arguments: Any, **options: Any) -> Any:
            last = communicator.size > 1 and next(calls, None) == kill.call
            if last and kill.when == "before":
                die()
            if last and kill.when == "in":
                threading.Thread(target=die, args=(random.uniform(0, 1e-3),)).start()
            result = operation(communicator, *arguments, **options)
            if last:
                die()
            return result

        return call

    def die(seconds: float = 0.0) -> None:
        time.sleep(seconds)
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    for kind in (BaseCommunicator, ShmCommunicator):
        for name in ("all_gather", "all_reduce", "broadcast", "barrier"):
            setattr(kind, name, counted(getattr(kind, name)))


def rank_main(folder: Path, kill: Kill) -> None:
    """Train as a rank, and write down each state."""
    die_at(kill, folder)
    x, y = NETWORKS["mlp"].batch(0, SAMPLES)
    options = MERGES if kill.merges else SUMS
    with open(folder / f"{os.getpid()}.jsonl", "a", buffering=1) as file:

        def tell(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")

        def learn(step: int, share: Any) -> None:
            if model.communicator.size < RANKS:
                time.sleep(JOINS[kill.backend])
            model.learn(x[share], y[share], SIGMA_V**2)

        config = DDPConfig.from_env(kill.backend)
        with DDPSequential(fresh("mlp"), config, elastic=5.0, **options) as model:
            loop = DistributedSampler(SAMPLES, 1, 0, seed=3), BATCH, 1
            train(model, folder, loop, learn, tell, kill.every, keep=99)
            tell(end=model.steps_made, ranks=model.communicator.size, hash=model.check_replicas())
            parameters = named_parameters(model._local.replica)
            np.savez(folder / f"{os.getpid()}.npz", **parameters)


def start(folder: Path, kill: Kill, ranks: int = RANKS) -> subprocess.CompletedProcess[str]:
    """Run a job to its end."""
    command = [Path(sys.executable).with_name("tagi-ddp"), "run", "-n", str(ranks)]
    options = ["--max-restarts", "1", "--timeout", str(LIMIT)]
    return subprocess.run(
        [*command, *options, __file__, "--rank", str(folder), json.dumps(asdict(kill))],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT + 30,
        check=False,
    )


def alone(until: int) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a model that one process has trained, and its parameters."""
    x, y = NETWORKS["mlp"].batch(0, SAMPLES)
    model = DDPSequential(fresh("mlp"), DDPConfig([], "auto", 0, 1), **SUMS)
    for step, share in DistributedSampler(SAMPLES, 1, 0, seed=3).steps(BATCH, 1):
        if step < until:
            model.learn(x[share], y[share], SIGMA_V**2)
    found = named_parameters(model._local.replica).items()
    return model, {name: array.copy() for name, array in found}


def broken_promises(folder: Path, kill: Kill, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what should not have happened in a job."""
    if done.returncode:
        return [f"it ended with {done.returncode}: {done.stderr[-1500:]}"]
    lines = read_lines(folder)
    ends = [line for line in lines if "end" in line]
    broken = false_checkpoints(saved_states(folder), lines)
    if {end["end"] for end in ends} != {STEPS} or len(ends) < RANKS - 1:
        broken.append(f"the ranks ended as {ends}")
    if len({end["hash"] for end in ends}) != 1:
        broken.append(f"replicas differ: {ends}")
    if not kill.merges:
        _, expected = alone(STEPS)
        for path in folder.glob("*.npz"):
            for name, array in np.load(path).items():
                if np.abs(array - expected[name]).max(initial=0) > 1e-4:
                    broken.append(f"{name} differs from that of one process")
    return broken


def run(kill: Kill, begun: dict[bool, Path]) -> list[str]:
    """Run a job; ``begun``: the checkpoint to go on from, of merges or not."""
    with tempfile.TemporaryDirectory(prefix="every_call.") as name:
        folder = Path(name)
        shutil.copytree(begun[kill.merges], folder / "checkpoints", symlinks=True)
        return broken_promises(folder, kill, start(folder, kill))


def begin(folder: Path) -> dict[bool, Path]:
    """Save runs of a few steps by one process, with sums and with merges."""
    from tagi_ddp.checkpoint import Checkpoints

    x, y = NETWORKS["mlp"].batch(0, SAMPLES)
    found = {}
    for merges, options in ((False, SUMS), (True, MERGES)):
        found[merges] = folder / str(merges)
        sampler = DistributedSampler(SAMPLES, 1, 0, seed=3)
        with (
            DDPSequential(fresh("mlp"), DDPConfig([], "auto", 0, 1), **options) as model,
            Checkpoints(found[merges], model, sampler=sampler) as checkpoints,
        ):
            for step, share in sampler.steps(BATCH, 1):
                if step < BEGIN:
                    model.learn(x[share], y[share], SIGMA_V**2)
            checkpoints.save(BEGIN)
    return found


def main() -> int:
    """Run the jobs, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first job")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank_main(Path(options.rank[0]), Kill(**json.loads(options.rank[1])))
        return 0
    began, broken = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="every_call.") as name:
        begun = begin(Path(name))
        for seed in range(options.first, options.first + options.jobs):
            kill = Kill.draw(seed)
            if found := run(kill, begun):
                broken += 1
                print(f"{kill}, --first {seed}:", *found, sep="\n    ", flush=True)
    seconds = time.monotonic() - began
    print(f"{options.jobs} jobs in {seconds:.0f} s; {broken} broke a promise")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
