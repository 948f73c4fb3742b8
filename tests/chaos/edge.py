"""Faults at the edge of a job: signals, storage, data that differ, launchers: ``make chaos``.

``python tests/chaos/edge.py --faults 400 --first 0`` draws so many faults by their numbers, and
plays each in a job of two or three ranks that saves checkpoints. Whatever happens, all ranks end,
no process is left, and a new start ends with the state of a job without a fault, to the bit. And:

- signal: SIGTERM or SIGUSR1 to one rank or to all: a checkpoint after the last step, status 75;
- storage: writes that stall or fail, on one rank: CheckpointError on all ranks, within the limit;
- data: another seed, size, order, length or rows, on one rank: RanksDiffer on all, before
  they exchange anything;
- launcher: it is killed, it gets a signal, or a rank is killed and it starts all again.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.checkpointed import digest
from chaos.forks import fork_ranks, lines, running
from support.rank_pool import worker_environment

from tagi_ddp import DDPSequential, DistributedSampler, init
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.environment import detect
from tagi_ddp.sequential.run_state import named_parameters

KINDS = {
    "signal": ("TERM to one", "TERM to all", "USR1 to one", "USR1 to all"),
    "storage": ("stalls", "is full"),
    "data": ("seed", "size", "shuffle", "length", "rows"),
    "launcher": ("killed", "TERM", "USR1", "restarts"),
}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "sums": {"average": False},
    "merges": {"reduction": "precision", "sync_every": 3},
}
STEPS, EVERY, PAUSE = 40, 7, 0.02  # PAUSE: seconds of a step, in which ranks ask for signals
TIMEOUT = 4.0  # seconds of the communicator; 0.7 of it for storage
LIMIT = 30.0  # seconds for all ranks of a job to end


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, the rank that has it, and the step at which it comes; "none": nothing."""

    number: int
    kind: str
    how: str
    ranks: int
    culprit: int
    step: int
    reduction: str

    @classmethod
    def draw(cls, number: int) -> Fault:
        dice = random.Random(number)
        kind = dice.choice([*KINDS, "signal", "data"])  # Launchers take the longest.
        ranks = dice.choice([2, 2, 3])
        how, culprit = dice.choice(KINDS[kind]), dice.randrange(ranks)
        step = dice.randrange(1, STEPS - 15)
        return cls(number, kind, how, ranks, culprit, step, dice.choice([*REDUCTIONS]))


def train(fault: Fault, folder: Path) -> None:
    """Train on this rank, with the fault if it has not happened yet; write down how it ends."""
    from pytagi import manual_seed
    from pytagi.nn import Linear, ReLU, Sequential

    rank = detect().rank
    story = os.open(folder / f"{rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def say(**what: Any) -> None:
        os.write(story, json.dumps(what).encode() + b"\n")

    say(pid=os.getpid())
    mine = rank == fault.culprit or "to all" in fault.how
    fresh = mine and not (folder / f"happened{rank}").exists()
    in_rank = fault.kind != "launcher" or fault.how == "restarts"
    how = fault.how if fresh and in_rank else ""
    x = np.random.default_rng(0).standard_normal((60, 3), np.float32)
    x = x[::-1].copy() if how == "rows" else x[:-1] if how == "length" else x
    seed, size = 1 + (how == "seed"), 12 - 2 * (how == "size")
    manual_seed(3)
    try:
        with (
            init("shm", timeout=TIMEOUT) as comm,
            DDPSequential(
                Sequential(Linear(3, 8), ReLU(), Linear(8, 1)),
                communicator=comm,
                **REDUCTIONS[fault.reduction],
            ) as model,
        ):
            sampler = DistributedSampler(x, shuffle=how != "shuffle", seed=seed)
            with Checkpoints(folder / "saved", model, sampler=sampler) as checkpoints:
                for step, share in sampler.steps(size, 8, checkpoints.resume()):
                    say(step=step)
                    if step == fault.step and how:
                        (folder / f"happened{rank}").touch()
                        _happen(how)
                    time.sleep(PAUSE)
                    model.learn(x[share], x[share].sum(1, keepdims=True), 0.1)
                    if step % EVERY == EVERY - 1:
                        checkpoints.save(step + 1)
            if model.unmerged_steps:
                model.merge()
            model._local.replica.pull()
            say(state=digest(named_parameters(model._local.replica)))
    except Exception as error:
        say(error=type(error).__name__, text=str(error), at=time.monotonic())
        raise
    finally:
        if how in KINDS["data"]:
            (folder / f"happened{rank}").touch()


def _happen(how: str) -> None:
    if how[:4] in ("TERM", "USR1"):
        os.kill(os.getpid(), getattr(signal, f"SIG{how[:4]}"))
    elif how == "restarts":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stalls":
        Folder.write = lambda *_: time.sleep(2 * LIMIT)  # type: ignore[method-assign]
    elif how == "is full":
        Folder.write = _full  # type: ignore[method-assign]


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


# --- jobs ----------------------------------------------------------------------------------------


def fork(fault: Fault, folder: Path) -> list[int | None]:
    """Return the exit statuses of ranks that are forks of this process; None: it never ended."""
    statuses = fork_ranks(fault.ranks, folder, partial(train, fault, folder), LIMIT, {})
    return list(statuses.values())


def launch(fault: Fault, folder: Path, disturb: bool) -> int | None:
    """Return the status of `tagi-ddp run`, which gets what the fault says at a random time."""
    command = [sys.executable, "-m", "tagi_ddp", "run", "-n", str(fault.ranks)]
    command += ["--max-restarts", "2", __file__, "--rank", str(folder), str(fault.number)]
    with (folder / "output").open("a") as output:
        environment = worker_environment({"PYTHONPATH": str(Path(__file__).parents[1])})
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        if disturb and fault.how != "restarts":
            _await_step(folder, fault.step)
            numbers = {"killed": signal.SIGKILL, "TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}
            process.send_signal(numbers[fault.how])
        try:
            return process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def _await_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        if any(line.get("step") == step for line in lines_of(folder)):
            return
        time.sleep(0.005)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [line for path in sorted(folder.glob("*.jsonl")) for line in lines(path)]


# --- promises ------------------------------------------------------------------------------------


def play(fault: Fault, expected: str) -> list[str]:
    """Play a fault, start the job again, and return the promises that were broken."""
    with tempfile.TemporaryDirectory(prefix="edge.") as name:
        folder = Path(name)
        if fault.kind == "launcher":
            broken = _with_launcher(fault, folder)
        else:
            began = time.monotonic()
            broken = _first_start(fault, folder, fork(fault, folder), began)
        pids = [line["pid"] for line in lines_of(folder) if "pid" in line]
        broken += [f"process {pid} was left" for pid in running(pids, 2)]
        for path in folder.glob("*.jsonl"):
            path.unlink()
        statuses = fork(fault, folder)
        if set(statuses) != {0}:
            broken.append(f"the new start ended with {statuses}")
        if {line["state"] for line in lines_of(folder) if "state" in line} != {expected}:
            broken.append("the new start ended with another state")
        if broken:
            broken.append((folder / "output").read_text()[-1500:])
        return broken


def _first_start(fault: Fault, folder: Path, statuses: list[int | None], began: float) -> list[str]:
    broken = [] if None not in statuses else ["a rank never ended"]
    errors = [line for line in lines_of(folder) if "error" in line]
    saved = [checkpoint.step for checkpoint in Folder(folder / "saved").whole()]
    steps = max((line["step"] for line in lines_of(folder) if "step" in line), default=-1) + 1
    if fault.kind == "signal":
        if set(statuses) != {75}:
            broken.append(f"statuses {statuses}, not 75")
        if max(saved, default=0) != steps:
            broken.append(f"saved {saved} after {steps} steps")
    elif fault.kind == "storage":
        seconds = max((line["at"] for line in errors), default=began) - began
        if [line["error"] for line in errors] != ["CheckpointError"] * fault.ranks:
            broken.append(f"errors {errors}")
        if not all(str(folder / "saved") in line["text"] for line in errors):
            broken.append("an error does not name the folder")
        if seconds > STEPS * PAUSE + 2 * TIMEOUT:
            broken.append(f"it took {seconds:.1f} s")
    else:  # `Checkpoints` compares settings of samplers before the first step.
        found = [line["error"] for line in errors]
        if found not in [[name] * fault.ranks for name in ("RanksDiffer", "CheckpointError")]:
            broken.append(f"errors {errors}")
        if steps > REDUCTIONS[fault.reduction].get("sync_every", 1) or saved:
            broken.append(f"{steps} steps, saved {saved}")
    return broken


def _with_launcher(fault: Fault, folder: Path) -> list[str]:
    status = launch(fault, folder, disturb=True)
    allowed = {
        "killed": {-signal.SIGKILL},
        "TERM": {75},
        "USR1": {75},
        "restarts": {0},
    }[fault.how]
    return [] if status in allowed else [f"the launcher ended with {status}"]


def campaign(numbers: range) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Play the faults with these numbers; return how many of each, and what broke."""
    import pytagi.nn  # noqa: F401

    gc.freeze()
    os.environ["TAGI_DDP_SECRET"] = secrets.token_hex()
    expected: dict[tuple[int, str], str] = {}
    for ranks in (2, 3):
        for reduction in REDUCTIONS:
            with tempfile.TemporaryDirectory(prefix="edge.") as name:
                fork(Fault(-1, "none", "", ranks, -1, -1, reduction), Path(name))
                (state,) = {line["state"] for line in lines_of(Path(name)) if "state" in line}
                expected[ranks, reduction] = state
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    failures = []
    for number in numbers:
        fault = Fault.draw(number)
        counts[fault.kind, fault.how] += 1
        if broken := play(fault, expected[fault.ranks, fault.reduction]):
            failures.append(f"{fault}:\n  " + "\n  ".join(broken))
            print(failures[-1], flush=True)
    return counts, failures


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        train(Fault.draw(int(sys.argv[3])), Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=400, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    options = parser.parse_args()
    start = time.monotonic()
    counts, failures = campaign(range(options.first, options.first + options.faults))
    print("| fault | |\n|---|---|")
    for kind, hows in KINDS.items():
        print(f"| {kind} | {', '.join(f'{how} {counts[kind, how]}' for how in hows)} |")
    total = sum(counts.values())
    print(f"{total} faults in {time.monotonic() - start:.0f} s; {len(failures)} broke a promise")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
