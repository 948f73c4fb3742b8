"""A rank that dies while all train: the others end soon, in an error that names it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
from support.networks import NETWORKS, learn
from support.rank_pool import Died, RankPool
from support.rank_worker import Uncaught
from support.reports import wrap

from tagi_ddp import PeerLost, Timeout
from tagi_ddp.optim.schedule import SyncSchedule

SIZE = 3
SLOW = pytest.mark.slow


def train_until(
    comm: Any, victim: int, way: str, delay: float, options: dict[str, Any] | None = None
) -> tuple[Any, Any, str, float]:
    """Train for ever; rank ``victim`` dies or stops after ``delay`` seconds."""
    model = wrap(comm, **(options or {}))
    if options:
        model.begin_epoch(10**9)
    x, y = NETWORKS["mlp"].batch(comm.rank, 64)
    model.barrier()
    end = time.monotonic() + delay
    if comm.rank == victim and way.startswith("SIG"):
        threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, way))).start()
    try:
        while True:
            learn(model, x, y)
            if comm.rank == victim and time.monotonic() > end:
                if way == "exit":
                    os._exit(3)
                if way == "error":
                    raise Uncaught("out of data")
            model.step()
    except Uncaught:
        raise
    except Exception as error:
        ranks = getattr(error, "ranks", None)
        return type(error), ranks, str(error), time.monotonic() - end


@pytest.mark.parametrize(
    "repetition", [0, 1, *(pytest.param(number, marks=SLOW) for number in (2, 3))]
)
@pytest.mark.parametrize("way", ["SIGKILL", "exit", "error"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_death(backend: str, way: str, repetition: int) -> None:
    dice = random.Random(f"{backend} {way} {repetition}")
    victim, delay = dice.randrange(SIZE), dice.uniform(0.0, 0.3)
    pool = RankPool(backend, SIZE)
    answers = pool.run(train_until, victim, way, delay, dying=[victim], timeout=30)
    pool.close()
    assert isinstance(answers.pop(victim), Died)
    for kind, ranks, text, seconds in answers:
        assert (kind, ranks) == (PeerLost, (victim,)), text
        assert seconds < 10


@pytest.mark.parametrize("way", ["SIGKILL", "error"])
@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_death_in_another_node(backend: str, victim: int, way: str) -> None:
    """Check that all ranks name the dead one, also those that wait for a rank between."""
    delay = random.Random(f"{backend} {victim} {way}").uniform(0.0, 0.3)
    schedule = SyncSchedule(1, 0, 0, max_global_skips=4)
    options = {"reduction": "precision", "sync_every": schedule, "node_size": 2}
    pool = RankPool(backend, 4)
    answers = pool.run(train_until, victim, way, delay, options, dying=[victim], timeout=30)
    pool.close()
    assert isinstance(answers.pop(victim), Died)
    for kind, ranks, text, seconds in answers:
        assert (kind, ranks) == (PeerLost, (victim,)), text
        assert seconds < 10


@pytest.mark.parametrize("repetition", [0, *(pytest.param(n, marks=SLOW) for n in range(1, 8))])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_stop_in_another_node(backend: str, repetition: int) -> None:
    """Ranks that wait for others blame the one that has stopped, whenever it does."""
    dice = random.Random(f"{backend} {repetition}")
    victim, delay = dice.randrange(4), dice.uniform(0.0, 0.3)
    schedule = SyncSchedule(1, 0, 0, max_global_skips=4)
    options = {"reduction": "precision", "sync_every": schedule, "node_size": 2}
    pool = RankPool(backend, 4)
    answers = pool.run(train_until, victim, "SIGSTOP", delay, options, silent=[victim], timeout=1)
    pool.close()
    answers.pop(victim)
    for kind, ranks, text, seconds in answers:
        assert issubclass(kind, (Timeout, PeerLost)), text
        assert ranks == (victim,), text
        assert seconds < 10


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_stop(backend: str) -> None:
    pool = RankPool(backend, SIZE)
    answers = pool.run(train_until, 1, "SIGSTOP", 0.1, silent=[1], timeout=2)
    pool.close()
    for kind, ranks, text, seconds in (answers[0], answers[2]):
        assert (kind, ranks) == (Timeout, (1,)), text
        assert 1.5 < seconds < 5
