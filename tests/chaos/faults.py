"""Random faults: what is drawn, and what each rank then must see."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

STEPS = 12
TIMEOUT = 2.0  # seconds, of every wait
NUMBER = 5  # the exit status of a rank that gives one

REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {"reduction": "mean"},
    "sum": {"reduction": "sum"},
    "sum, sharded": {"reduction": "sum", "sharded": True},
    "precision": {"reduction": "precision"},
    "precision, every 3": {"reduction": "precision", "sync_every": 3},
    "precision, two levels": {"reduction": "precision", "sync_every": "schedule"},
}
SELDOM = ("precision, every 3", "precision, two levels")
LOST, LATE, DIFFERENT = ("PeerLost",), ("Timeout", "PeerLost"), ("Mismatch",)
# What the other ranks raise, naming the culprit; () where all go on.
KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "late": (),
    "nan": (),
    "kill": LOST,
    "raise": LOST,
    "exit": LOST,
    "abort": LOST,
    "close": LOST,
    "skip": ("Mismatch", "PeerLost"),  # a step less than the others
    "other": DIFFERENT,
    "stop": LATE,
}

STATUSES = {"kill": 137, "exit": NUMBER}  # of `tagi-ddp run`; else 1 where a rank failed


@dataclass(frozen=True)
class Fault:
    """A fault of rank ``culprit`` at step ``step`` of a job, and the job's settings."""

    seed: int
    kind: str
    backend: str
    launcher: str
    ranks: int
    culprit: int
    step: int
    reduction: str

    @classmethod
    def draw(cls, seed: int) -> Fault:
        """Return the fault with this number, always the same."""
        dice = random.Random(seed)
        kind = dice.choice([kind for kind in KINDS for _ in range(1 if kind == "stop" else 4)])
        launcher = dice.choices(["fork", "tagi-ddp run", "torchrun", "mpirun"], [60, 3, 1, 3])[0]
        backend = "mpi" if launcher == "mpirun" else dice.choice(["shm", "shm", "gloo"])
        ranks = dice.randint(2, 5 if launcher == "fork" else 3)
        culprit, step = dice.randrange(ranks), dice.randrange(STEPS)
        # Two levels do not see what is called on the communicator of all.
        fitting = list(REDUCTIONS)[: -1 if kind == "other" else None]
        reduction = dice.choice(fitting)
        # Ranks between the stopped one and others need two nodes of two; few jobs have these.
        if kind == "stop" and launcher == "fork" and dice.random() < 0.5:
            ranks, culprit, reduction = 4, dice.randrange(4), "precision, two levels"
        return cls(seed, kind, backend, launcher, ranks, culprit, step, reduction)

    def __str__(self) -> str:
        """Return all that was drawn."""
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())


@dataclass
class Report:
    """The end of one rank: its status, its error, and the hashes of its steps."""

    #: Exit status, or minus the signal; None: it was still running at the limit.
    status: int | None
    #: A hash of the parameters after each step, at which all ranks had been made equal.
    hashes: dict[int, str]
    #: The type of the error that ended it, the ranks it blames, its text; "" if none did.
    error: str = ""
    blamed: tuple[int, ...] = ()
    text: str = ""
    #: Steps refused because of a delta that is not finite, and whether that changed a parameter.
    refused: int = 0
    changed: bool = False


def broken_promises(fault: Fault, reports: list[Report], left: list[str]) -> list[str]:
    """Return what should not have happened."""
    broken = [f"{thing} was left behind" for thing in left]
    for step in range(STEPS):
        found = {report.hashes[step] for report in reports if step in report.hashes}
        if len(found) > 1:
            broken.append(f"replicas differ after step {step}")
    expected = KINDS[fault.kind]
    if fault.kind == "skip" and fault.reduction in SELDOM:
        expected = ()  # as many merges, of whatever steps
    if fault.launcher == "tagi-ddp run":
        status = STATUSES.get(fault.kind, 1 if expected else 0)
        if reports[0].status != status:
            broken.append(f"the launcher ended with {reports[0].status}, not {status}")
    for rank, report in enumerate(reports):
        if report.status is None:
            if not (fault.kind == "stop" and rank == fault.culprit):
                broken.append(f"rank {rank} never ended")
        elif rank != fault.culprit or not expected:
            broken += [f"rank {rank}: {what}" for what in _wrong_end(fault, report, expected)]
        if report.changed:
            broken.append(f"rank {rank}: a step that was refused changed a parameter")
    return broken


def _wrong_end(fault: Fault, report: Report, expected: tuple[str, ...]) -> list[str]:
    if not expected:
        refused = int(fault.kind == "nan")
        wrong = [] if report.refused == refused else [f"refused {report.refused} steps"]
        return wrong + [f"ended in {report.error}: {report.text}"] * bool(report.error)
    if not report.error:  # a launcher may have ended it before it noticed
        return [] if fault.launcher != "fork" and report.status else ["did not notice"]
    wrong = [] if report.error in expected else [f"got {report.error}: {report.text}"]
    if fault.culprit not in report.blamed:
        wrong.append(f"blames {report.blamed}: {report.text}")
    return wrong
