"""Elastic jobs in which ranks are killed, stopped and joined at random: a part of ``make chaos``.

``python tests/chaos/elastic.py --events 1000 --first 0`` runs a job of each kind of four ranks, for
that many events together, and says which promises were broken: all ranks that are left go on with
equal replicas, ranks that join or come back are taken in, ranks with another network are refused,
checkpoints hold as many steps as they say, the job ends well after all its steps, and has learned
as much as one to which nothing happens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos.checkpointed import false_checkpoints, saved_states
from chaos.elastic_rank import EPOCH, KINDS, PATIENCE

RANKS = 4
STEPS = 120  # for each event
LIMIT = 30.0  # seconds for what must follow an event
SOON = 3.0  # seconds until all ranks have told of a state
MOST = 0.01  # by so much, at most, may the negative log-likelihood be worse
# What is timed.
KILL = "from a kill to all survivors' next step"
JOIN = "from a joiner's coming to its first step"
STOP = "from a stop to the survivors' new group"
SCRIPT = Path(__file__).with_name("elastic_rank.py")
LAUNCHER = [str(Path(sys.executable).with_name("tagi-ddp")), "run"]


class BrokenPromise(AssertionError):
    """A violation of what an elastic job promises."""


class Job:
    """A job, and what its ranks tell, by process."""

    def __init__(self, folder: Path, kind: str, steps: int, ranks: int, restarts: int) -> None:
        self.lines: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._folder = folder
        self._read: Counter[Path] = Counter()
        self._output = open(folder / "output", "w")  # noqa: SIM115  (the process writes to it)
        script = (SCRIPT, folder, kind, steps)
        self._process = subprocess.Popen(
            [*LAUNCHER, "-n", str(ranks), "--max-restarts", str(restarts), *map(str, script)],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.dead: set[int] = set()
        self.stopped: set[int] = set()

    def look(self) -> None:
        """Read what is new."""
        for path in self._folder.glob("*.jsonl"):
            with open(path) as file:
                file.seek(self._read[path])
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] += len(whole)
            self.lines[int(path.stem)] += [json.loads(line) for line in whole.splitlines()]

    def wait(self, what: str, seconds: float = LIMIT) -> Iterator[None]:
        """Look again and again; BrokenPromise if that takes longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            yield
            if (status := self._process.poll()) is not None:
                raise BrokenPromise(f"{what}: the job ended with {status}\n{self.output()}")
            time.sleep(0.01)
        raise BrokenPromise(f"{what}: not within {seconds:g} s\n{self.output()}\n{self.tails()}")

    def living(self) -> list[int]:
        """Return the processes that have begun, and that nothing has happened to."""
        told = [pid for pid, lines in self.lines.items() if lines]
        self.dead |= {pid for pid in told if self.lines[pid][0]["stranger"]}
        return [pid for pid in told if pid not in self.dead | self.stopped]

    def group_of(self, pid: int) -> dict[str, Any]:
        """Return a rank's last group, and when it knew of it: of the first its number alone."""
        changes = [line for line in self.lines[pid] if "change" in line]
        return changes[-1] if changes else {"change": {"group": 1, "size": RANKS}, "time": 0.0}

    def await_group(self, what: str, pids: list[int]) -> None:
        """Return when exactly these ranks are a group, and have all made a step in it."""
        for _ in self.wait(what):
            groups = {self.group_of(pid)["change"]["group"] for pid in pids}
            sizes = {self.group_of(pid)["change"]["size"] for pid in pids}
            made = all("step" in self.lines[pid][-1] for pid in pids)
            if len(groups) == 1 and sizes == {len(pids)} and made:
                return

    def first_step_after(self, pid: int, moment: float) -> float:
        """Return when a rank had made its first step in the first group after that."""
        lines = iter(self.lines[pid])
        next(line for line in lines if "change" in line and line["time"] > moment)
        return float(next(line["time"] for line in lines if "step" in line))

    def finish(self, seconds: float) -> list[dict[str, Any]]:
        """Hurry the job to its end; return the last line of each rank that reached it."""
        (self._folder / "hurry").touch()
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BrokenPromise(f"the job did not end\n{self.output()}\n{self.tails()}") from None
        if status:
            raise BrokenPromise(f"the job ended with {status}\n{self.output()}")
        self.look()
        return [lines[-1] for lines in self.lines.values() if lines and "hash" in lines[-1]]

    def hashes(self) -> dict[int, set[str]]:
        """Return what the ranks say of each group's state."""
        found: defaultdict[int, set[str]] = defaultdict(set)
        for lines in self.lines.values():
            for line in lines:
                if "change" in line:
                    found[line["change"]["group"]].add(line["change"]["hash"])
        return found

    def check_checkpoints(self) -> None:
        """Raise BrokenPromise if a checkpoint is not of as many steps as it says."""
        saved, false = list(saved_states(self._folder)), [""]
        deadline = time.monotonic() + SOON
        while false:  # the ranks may still have to tell of the last state
            self.look()
            told = (line for lines in self.lines.values() for line in lines)
            false = false_checkpoints(saved, told)
            if false and time.monotonic() > deadline:
                raise BrokenPromise("; ".join(false))

    def output(self) -> str:
        """Return the end of what the job has printed."""
        return (self._folder / "output").read_text()[-9000:]

    def tails(self) -> str:
        """Return the last lines of all ranks."""
        return "\n".join(f"{pid}: {lines[-2:]}" for pid, lines in self.lines.items())

    def close(self) -> None:
        """End it, whatever it does."""
        for pid in self.stopped:
            os.kill(pid, signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        self._output.close()


class Campaign:
    """Random events in one job; ``seconds`` are those that survivors and joiners took."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.count: Counter[str] = Counter()
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._random = random.Random(seed)

    def happen(self, left: int) -> int:
        """Stop a rank, or kill one, or two if ``left`` >= 4; return the number of events."""
        before = sum(self.count.values())
        time.sleep(self._random.uniform(0, 0.1))
        draw = self._random.random()
        if draw < 0.25:
            self._stop(self._random.choice([PATIENCE / 4, PATIENCE * 3]))
        else:
            self._kill(2 if draw > 0.85 and left >= 4 else 1)
        self.job.check_checkpoints()
        return sum(self.count.values()) - before

    def _kill(self, count: int) -> None:
        """Kill ranks, one of them maybe while the others meet; others take their places."""
        job = self.job
        living = job.living()
        victims = self._random.sample(living, count)
        for victim in victims:
            moment = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            job.dead.add(victim)
            self.count["kill"] += 1
            if count > 1:
                time.sleep(self._random.uniform(0, 0.02))
        survivors = [pid for pid in living if pid not in victims]
        for _ in job.wait("survivors go on after a kill"):
            later = [job.group_of(pid)["time"] > moment for pid in survivors]
            if all(later) and all("step" in job.lines[pid][-1] for pid in survivors):
                break
        took = max(job.first_step_after(pid, moment) for pid in survivors) - moment
        self.seconds[KILL].append(took)
        self._await_new(count)

    def _await_new(self, count: int) -> None:
        """Wait until those who take the places of the dead are there."""
        job = self.job
        for _ in job.wait("others join"):
            if len(job.living()) == RANKS:
                break
        living = sorted(job.living(), key=lambda pid: job.lines[pid][0]["time"])
        job.await_group("those who join are in the group", living)
        for pid in living[-count:]:
            joining = next(line for line in job.lines[pid] if "change" in line)
            self.count["join"] += 1
            step = next(line["time"] for line in job.lines[pid] if "step" in line)
            took = joining["change"]["seconds"] + step - joining["time"]
            self.seconds[JOIN].append(took)

    def _stop(self, seconds: float) -> None:
        """Stop a rank for a while: if it is long it is left behind, and comes back."""
        job = self.job
        victim = self._random.choice(job.living())
        os.kill(victim, signal.SIGSTOP)
        job.stopped.add(victim)
        self.count["stop"] += 1
        survivors, moment = job.living(), time.monotonic()
        if seconds < PATIENCE:
            time.sleep(seconds)
        else:
            job.await_group("those who go on without a stopped one", survivors)
            took = max(job.group_of(pid)["time"] for pid in survivors) - moment
            self.seconds[STOP].append(took)
        os.kill(victim, signal.SIGCONT)
        job.stopped.discard(victim)
        job.await_group("a stopped one comes back", job.living())


def run(kind: str, events: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run a job of one kind with so many events; return what it showed; BrokenPromise."""
    steps = EPOCH * math.ceil(events * STEPS / EPOCH)
    job = Job(folder, kind, steps, RANKS, 10 * events)
    try:
        for _ in job.wait("all ranks begin"):
            begun = job.living()
            if len(begun) == RANKS and all("step" in job.lines[pid][-1] for pid in begun):
                break
        campaign = Campaign(job, seed)
        left = events
        while left > 0:
            left -= campaign.happen(left)
        ends = job.finish(LIMIT + steps / 50)
    finally:
        job.close()
    if [end["steps"] for end in ends] != [steps] * RANKS:
        raise BrokenPromise(f"{RANKS} ranks should end after {steps} steps: {ends}\n{job.output()}")
    job.check_checkpoints()
    if len({end["hash"] for end in ends}) > 1:
        raise BrokenPromise(f"replicas differ at the end: {ends}")
    if several := [group for group, hashes in job.hashes().items() if len(hashes) > 1]:
        raise BrokenPromise(f"replicas differ in groups {several}")
    alone = undisturbed(kind, steps)
    if ends[0]["nll"] > alone + MOST:
        raise BrokenPromise(f"{ends[0]['nll']:.4f} instead of {alone:.4f}")
    return {
        "events": dict(campaign.count),
        "groups": len(job.hashes()) + 1,
        "nll": ends[0]["nll"],
        "undisturbed": alone,
        "seconds": campaign.seconds,
    }


def undisturbed(kind: str, steps: int) -> float:
    """Return the negative log-likelihood of a job to which nothing happens.

    Over shared memory, where it is soonest done: what carries the bytes changes the rounding only.
    """
    kind = kind.replace("gloo", "shm")
    with tempfile.TemporaryDirectory(prefix="elastic.") as name:
        job = Job(Path(name), kind, steps, RANKS, 0)
        try:
            return float(job.finish(LIMIT + steps / 20)[0]["nll"])
        finally:
            job.close()


def main() -> int:
    """Run a job of each kind, print a table, and return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first job")
    parser.add_argument("--kind", choices=KINDS, help="only this one, with its share of the events")
    options = parser.parse_args()
    broken = 0
    print("| job of 4 ranks | kills | joins | stops | groups | NLL | undisturbed |", end="")
    print(" kill to next step, median, worst | join to first step, median, worst |", end="")
    print(" stop beyond the limit to new group, median, worst |")
    print("|---" * 10 + "|")
    for number, kind in enumerate(KINDS):
        if options.kind not in (None, kind):
            continue
        with tempfile.TemporaryDirectory(prefix="elastic.") as name:
            try:
                shown = run(kind, options.events // len(KINDS), options.first + number, Path(name))
            except BrokenPromise as error:
                print(f"{kind}: {error}")
                broken += 1
                continue
        count, named = shown["events"], shown["seconds"]
        print(
            f"| {kind} | {count.get('kill', 0)} | {count.get('join', 0)} | {count.get('stop', 0)} "
            f"| {shown['groups']} | {shown['nll']:.4f} | {shown['undisturbed']:.4f} "
            + "".join(
                f"| {statistics.median(seconds):.3f} s, {max(seconds):.3f} s "
                if (seconds := named.get(what))
                else "| "
                for what in (KILL, JOIN, STOP)
            )
            + "|",
            flush=True,
        )
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
