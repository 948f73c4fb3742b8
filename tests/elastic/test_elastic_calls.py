"""Elastic jobs whose ranks are lost, join or differ beside the steps; see tests/chaos for more."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import every_call
from chaos.every_call import Kill
from support.rank_pool import worker_environment

LAUNCHER = Path(sys.executable).with_name("tagi-ddp")


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    return every_call.begin(tmp_path_factory.mktemp("begun"))


@pytest.mark.parametrize(
    "kill",
    [
        # While the first group is made, in Checkpoints(), in resume() and in its last call, and
        # later in a save, where the new rank joins while the others save after each step.
        pytest.param(Kill(1, 3, "before", "shm", False, 2), marks=pytest.mark.slow),
        pytest.param(Kill(0, 12, "behind", "shm", False, 1), marks=pytest.mark.slow),
        pytest.param(Kill(1, 26, "before", "shm", False, 2), marks=pytest.mark.slow),
        pytest.param(Kill(2, 33, "behind", "shm", True, 1), marks=pytest.mark.slow),
        Kill(2, 60, "before", "shm", False, 1),
        pytest.param(Kill(0, 60, "behind", "gloo", True, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_rank_that_is_killed_at_any_call(begun: dict[bool, Path], kill: Kill) -> None:
    assert every_call.run(kill, begun) == []


SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
from pytagi.nn import Linear, Sequential
from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import Checkpoints

what, killed, rank = json.loads(sys.argv[1]), Path("killed"), os.environ["RANK"]
other = killed.exists() or (rank == "1" and not what["kill"])
width, length, epochs, number = (what[key][other] for key in ("width", "length", "epochs", "save"))
x = np.ones((30, 1), np.float32)
network = Sequential(Linear(1, width), Linear(width, 1))
with DDPSequential(network, DDPConfig.from_env("shm"), average=False, elastic=10.0) as model:
    with Checkpoints("checkpoints", model) as checkpoints:
        for step, share in model.steps(DistributedSampler(length), 6, epochs, checkpoints.resume()):
            if step == 2 and rank == "1" and what["kill"] and not other:
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 4 and what["kill"]:
                time.sleep(0.5)  # the new rank comes
            model.learn(x[share], x[share], 0.1)
            checkpoints.save(step + number)
    print("ended", model.steps_made, model.communicator.size)
"""
SAME = {"kill": True, "width": [4, 4], "length": [30, 30], "epochs": [6, 6], "save": [1, 1]}


def start(folder: Path, **what: object) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [LAUNCHER, "run", "-n", "3", "--max-restarts", "1", "--timeout", "60", "script.py"]
    return subprocess.run(
        [*command, json.dumps({**SAME, **what})],
        cwd=folder,
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"width": [4, 5]}, "ReplicaMismatch: this network is not the one that the job trains: it"),
        pytest.param(
            {"length": [30, 24]},
            "RanksDiffer: steps() differs from that of the other ranks, first",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_new_rank_that_is_unlike_the_others_is_refused(
    tmp_path: Path, what: dict[str, object], text: str
) -> None:
    done = start(tmp_path, **what)
    assert done.returncode == 0, done.stderr
    assert text in done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] ended 30 2", "[2] ended 30 2"]


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ({"length": [30, 24]}, "RanksDiffer: steps() differ first at length of rank 1: 24; rank 0"),
        ({"save": [0, 0]}, "ValueError: step is 0, but 1 steps have been made: give that number"),
    ],
)
def test_ranks_that_differ_from_the_start_end(
    tmp_path: Path, what: dict[str, object], text: str
) -> None:
    done = start(tmp_path, kill=False, **what)
    assert done.returncode == 1
    assert text in done.stderr
