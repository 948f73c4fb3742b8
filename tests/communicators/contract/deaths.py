"""Ranks that die or stop at a random point: the others end soon, in an error that names them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from contract.data import caught
from support.rank_pool import Died, RankPool
from support.rank_worker import Uncaught

from tagi_ddp.communicators import PeerLost, Timeout

WAYS = ("SIGKILL", "exit", "error")


def work_until(comm: Any, victim: int, way: str, delay: float) -> tuple[type, Any, str, float]:
    """Work in a loop; rank ``victim`` dies after ``delay`` seconds, wherever it is by then.

    Returns type, ranks and text of this rank's error, and the seconds from the death to it.
    """
    comm.barrier()
    started = time.monotonic()
    if comm.rank == victim and way.startswith("SIG"):
        threading.Timer(delay, os.kill, (os.getpid(), getattr(signal, way))).start()
    error = caught(lambda: work_in_a_loop(comm, victim, way, started + delay))
    if isinstance(error, Uncaught):
        raise error
    ranks = getattr(error, "ranks", None)
    return type(error), ranks, str(error), time.monotonic() - started - delay


def work_in_a_loop(comm: Any, victim: int, way: str, end: float) -> None:
    small, large = np.ones(100, np.float32), np.ones(300_000, np.float32)
    gathered = np.empty(100 * comm.size, np.float32)
    while True:
        comm.all_reduce(small, "mean")
        comm.broadcast(large, 0)
        comm.all_gather(small, gathered)
        handle = comm.all_reduce(large, "mean", async_op=True)
        if comm.rank == victim and time.monotonic() > end:
            if way == "exit":
                os._exit(3)
            if way == "error":
                raise Uncaught("out of cheese")
        handle.wait()
        comm.barrier()


def broadcast_without(comm: Any, victim: int) -> tuple[type, Any, float]:
    """Broadcast what fits into any buffer, so that it may be complete without the dead rank."""
    comm.barrier()
    if comm.rank == victim:
        time.sleep(0.2)
        os._exit(3)
    started = time.monotonic()

    def share() -> None:
        comm.broadcast(np.ones(100, np.float32), 0)
        comm.barrier()

    error = caught(share)
    return type(error), getattr(error, "ranks", None), time.monotonic() - started


def end_at_once(comm: Any) -> None:
    comm.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


class DeathsContract:
    """At every number of ranks from 2 on, each test in processes of its own."""

    @pytest.mark.parametrize("repetition", [1, 2])
    @pytest.mark.parametrize("way", WAYS)
    def test_death(self, doomed: RankPool, size: int, way: str, repetition: int) -> None:
        dice = random.Random(f"{size} {way} {repetition}")
        victim, delay = dice.randrange(size), dice.uniform(0.05, 0.3)
        answers = doomed.run(work_until, victim, way, delay, dying=[victim], timeout=30)
        assert isinstance(answers[victim], Died)
        del answers[victim]
        for kind, ranks, text, seconds in answers:
            assert (kind, ranks) == (PeerLost, (victim,)), text
            ended = "gave up: Uncaught: out of cheese" if way == "error" else "died"
            assert text.count(" on rank ") == 1, text  # the root, not who passed it on
            assert f" of {size} ({doomed.backend}): rank {victim} {ended}" in text, text
            assert seconds < 10

    def test_death_before_a_broadcast(self, doomed: RankPool, size: int) -> None:
        victim = size - 1
        answers = doomed.run(broadcast_without, victim, dying=[victim], timeout=30)
        del answers[victim]
        for kind, ranks, seconds in answers:
            assert (kind, ranks) == (PeerLost, (victim,))
            assert seconds < 10

    def test_death_of_all(self, doomed: RankPool, size: int) -> None:
        answers = doomed.run(end_at_once, dying=range(size))
        assert all(isinstance(answer, Died) for answer in answers)


class StopContract:
    """At every number of ranks from 2 on, each test in processes of its own."""

    def test_stop(self, doomed: RankPool, size: int) -> None:
        dice = random.Random(size)
        victim, delay = dice.randrange(size), dice.uniform(0.05, 0.3)
        answers = doomed.run(work_until, victim, "SIGSTOP", delay, silent=[victim], timeout=4)
        del answers[victim]
        for kind, ranks, text, seconds in answers:
            assert (kind, ranks) == (Timeout, (victim,)), text
            assert 3.5 < seconds < 4 + 3
