"""Ranks that come late, differ, give up or leave: every wait ends in an error that names them."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.data import announce, await_ranks, caught
from support.rank_pool import RankPool

import tagi_ddp
from tagi_ddp.communicators import CommunicatorError, Mismatch, PeerLost, Timeout, init

LIMIT = 1.0  # of the communicator, in seconds
SLACK = 1.5  # of a busy machine


def ones(count: int = 8) -> np.ndarray:
    return np.ones(count, np.float32)


# What the others call while the last rank does not come.
WAITS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda c: c.all_reduce(ones()),
    "large all_reduce": lambda c: c.all_reduce(ones(2_000_000)),
    "broadcast": lambda c: c.broadcast(ones(), c.size - 1),
    "all_gather": lambda c: c.all_gather(ones(), ones(8 * c.size)),
    "large all_gather": lambda c: c.all_gather(ones(100), ones(100 * c.size)),
    "reduce_scatter": lambda c: c.reduce_scatter(ones(8 * c.size), ones()),
    "all_to_all": lambda c: c.all_to_all(ones(8 * c.size), ones(8 * c.size)),
    "recv": lambda c: c.recv(ones(), c.size - 1) if c.rank < c.size - 1 else c.send(ones(), 0),
    "barrier": lambda c: c.barrier(),
    "split": lambda c: c.split(0),
    "asynchronous": lambda c: c.all_reduce(ones(), async_op=True).wait(),
}

# What the last rank calls, and what the others call meanwhile.
DIFFERENT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "operation": (
        lambda c: c.broadcast(ones(), 0),
        lambda c: c.all_reduce(ones()),
    ),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_gather(ones(), ones(8 * c.size))),
    "split": (lambda c: c.split(0), lambda c: c.barrier()),
    "fewer elements": (lambda c: c.all_reduce(ones(7)), lambda c: c.all_reduce(ones())),
    "more elements": (lambda c: c.all_reduce(ones(3_000_000)), lambda c: c.all_reduce(ones())),
    "broadcast count": (lambda c: c.broadcast(ones(9)), lambda c: c.broadcast(ones(8))),
    "dtype": (
        lambda c: c.all_reduce(np.ones(8, np.int32)),
        lambda c: c.all_reduce(np.ones(8, np.float32)),
    ),
    "broadcast dtype": (
        lambda c: c.broadcast(np.ones(8, np.int32)),
        lambda c: c.broadcast(np.ones(8, np.float32)),
    ),
    "op": (lambda c: c.all_reduce(ones(), "max"), lambda c: c.all_reduce(ones(), "min")),
    "root": (lambda c: c.broadcast(ones(), 1), lambda c: c.broadcast(ones(), 0)),
    "gather": (
        lambda c: c.all_gather(ones(4), ones(4 * c.size)),
        lambda c: c.all_gather(ones(100), ones(100 * c.size)),
    ),
    "gather counts": (
        lambda c: c.all_gather(ones(8), ones(9 * c.size - 1), [9] * (c.size - 1) + [8]),
        lambda c: c.all_gather(ones(8), ones(8 * c.size)),
    ),
    "scatter counts": (
        lambda c: c.reduce_scatter(ones(8 * c.size), ones(8)),
        lambda c: c.reduce_scatter(
            ones(8 * c.size), ones(8 + (c.rank == 0)), [9] + [8] * (c.size - 2) + [7]
        ),
    ),
    "table of counts": (
        lambda c: c.all_to_all(
            ones(8 * c.size + 1), ones(8 * c.size), [9] + [8] * (c.size - 1), [8] * c.size
        ),
        lambda c: c.all_to_all(ones(8 * c.size), ones(8 * c.size)),
    ),
}

# What rank 0 sends to rank 1, and what that expects.
MESSAGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "fewer": (lambda c: c.send(ones(7), 1), lambda c: c.recv(ones(8), 0)),
    "more": (lambda c: c.send(ones(900_000), 1), lambda c: c.recv(ones(8), 0)),
    "dtype": (lambda c: c.send(np.ones(8, int), 1), lambda c: c.recv(np.ones(8), 0)),
    "tag": (lambda c: c.send(ones(), 1, tag=3), lambda c: c.recv(ones(), 0, tag=4)),
}

Report = tuple[type, tuple[int, ...], str, float]


def report(call: Callable[[], Any]) -> Report:
    """Return type, ranks and text of the error that ``call`` ends in, and its seconds."""
    started = time.monotonic()
    error = caught(call)
    assert isinstance(error, CommunicatorError), error
    return type(error), error.ranks, str(error), time.monotonic() - started


Timed = tuple[float, Report]  # when the call began, on a clock that all ranks share


def timed(call: Callable[[], Any]) -> Timed:
    return time.monotonic(), report(call)


def wait_without_the_last(comm: Any, folder: Path, call: Callable[[], Any]) -> Timed | None:
    """Return how ``call`` ends on this rank; the last one does not make it."""
    comm.barrier()  # so that only the last rank is late
    if comm.rank == comm.size - 1:
        await_ranks(folder, range(comm.size - 1))
        return None
    answer = timed(call)
    announce(folder, comm.rank)
    return answer


def check_timeouts(answers: list[Timed], late: int, words: str) -> None:
    """Check that all ranks but ``late`` give up on it, one limit after the first began to wait.

    A rank that began later than another hears of the end earlier.
    """
    first = min(began for began, _ in answers)
    for began, (kind, ranks, text, seconds) in answers:
        assert (kind, ranks) == (Timeout, (late,)), text
        assert words in text
        assert began + seconds - first > LIMIT * 0.9
        assert seconds < LIMIT + SLACK


def within_limit(pool: RankPool) -> str:
    """Return words of the error about a rank that made a barrier only."""
    lives = f"within {LIMIT:g} s; its process lives"
    # Operations on a device run behind the calls of their ranks.
    return lives if pool.backend == "nccl" else f"{lives}, and its last call was barrier #1. Look"


def come_late(comm: Any, call: Callable[[Any], Any], folder: Path) -> list[Report]:
    """Make the last rank call after the others have given up; return the errors of this rank."""
    if comm.rank == comm.size - 1:
        await_ranks(folder, range(comm.size - 1))
    first = report(lambda: call(comm))
    announce(folder, comm.rank)
    # Once broken, on every rank, for good.
    return [first, report(lambda: comm.all_reduce(ones())), report(comm.barrier)]


def late_for_one(comm: Any, folder: Path) -> Timed | None:
    return wait_without_the_last(comm, folder, lambda: comm.all_reduce(ones(), timeout=LIMIT))


def give_up_first(comm: Any, folder: Path) -> Timed | None:
    limit = LIMIT if comm.rank == 0 else 5 * LIMIT
    return wait_without_the_last(comm, folder, lambda: comm.broadcast(ones(), 0, timeout=limit))


def late_for_all(comm: Any, folder: Path) -> Timed | None:
    def wait() -> None:
        comm.timeout = LIMIT
        assert comm.timeout == LIMIT
        comm.barrier()

    return wait_without_the_last(comm, folder, wait)


def make_calls_that_differ(
    comm: Any, last: Callable[[Any], Any], others: Callable[[Any], Any]
) -> list[Report]:
    call = last if comm.rank == comm.size - 1 else others
    return [report(lambda: call(comm)), report(comm.barrier)]


def misdirect(comm: Any, send: Callable[[Any], Any], recv: Callable[[Any], Any]) -> Report:
    def call() -> None:
        if comm.rank == 0:
            send(comm)
        elif comm.rank == 1:
            recv(comm)
        comm.barrier()

    return report(call)


def give_up(comm: Any, wait: Callable[[Any], Any]) -> list[Report]:
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
        comm.abort("no more batches")
    elif comm.rank == 1:
        time.sleep(0.4)  # comes after the fact
    return [report(lambda: wait(comm)), report(comm.barrier)]


def blame_another(comm: Any) -> Report | None:
    comm.check()
    comm.barrier()
    if comm.rank == 0:
        comm.abort("the last one is gone", [comm.size - 1])
        return None

    def look() -> None:
        for _ in range(500):  # nobody calls anything
            comm.check()
            time.sleep(0.01)

    return report(look)


def leave_with_error(comm: Any) -> Report | str:
    if comm.rank == comm.size - 1:
        try:
            with comm:
                raise KeyError("weights")
        except KeyError:
            return str(caught(comm.barrier))
    return report(comm.barrier)


def close_early(comm: Any) -> Report | str:
    comm.barrier()
    if comm.rank == comm.size - 1:
        comm.close()
        comm.close()
        return str(caught(lambda: comm.all_reduce(ones())))
    return report(lambda: comm.all_reduce(ones()))


def close(comm: Any) -> list[str]:
    with comm as same:
        assert same is comm
        comm.barrier()
    comm.close()
    calls = [call for name, call in WAITS.items() if name != "recv" or comm.size > 1]
    errors = [caught(lambda call=call: call(comm)) for call in calls]
    assert all(type(error) is CommunicatorError for error in errors), errors
    return [str(error) for error in errors]


def fail_later(comm: Any) -> Report | None:
    if comm.rank == comm.size - 1:
        time.sleep(0.2)
        comm.abort("never mind")
        return None
    works = [comm.all_reduce(ones(), async_op=True) for _ in range(3)]
    first = report(works[0].wait)
    for work in works:
        assert isinstance(caught(work.wait), PeerLost)
        assert work.done()
    return first


def forget_a_part(comm: Any) -> Report | None:
    part = comm.split(0)
    part.all_reduce(ones())
    if comm.rank < comm.size - 1:
        answer = report(part.barrier)
        comm.barrier(timeout=10)
        return answer
    time.sleep(0.1)  # until a thread waits for messages to it
    del part
    gc.collect()
    gc.disable()  # what is left then, stays
    try:
        comm.barrier(timeout=10)
    finally:
        gc.enable()
    return None


def init_without_last(comm: Any, settings: dict[str, Any]) -> Timed | None:
    comm.barrier(timeout=10)  # so that only the last rank is late
    if comm.rank == comm.size - 1:
        comm.barrier(timeout=10)
        return None
    where = {"rank": comm.rank, "world_size": comm.size, "timeout": LIMIT}
    answer = timed(lambda: init(**{**settings, **where}))
    comm.barrier(timeout=10)
    return answer


def init_with_another_version(comm: Any, settings: dict[str, Any]) -> Report:
    """Return how init() ends, with another version of the package on the last rank."""
    package, own = sys.modules["tagi_ddp"], tagi_ddp.__version__
    package.__version__ = "99.0" if comm.rank == comm.size - 1 else own  # type: ignore[attr-defined]
    where = {"rank": comm.rank, "world_size": comm.size, "timeout": 10.0}
    try:
        return report(lambda: init(**{**settings, **where}))
    finally:
        package.__version__ = own  # type: ignore[attr-defined]
        comm.barrier()
        init(**{**settings, **where}).close()  # It finds nothing of the one before.


class InitContract:
    """At every number of ranks from 2 on."""

    def test_other_version(self, pool: RankPool, size: int) -> None:
        settings = pool.settings(f"{size} ranks of two versions")
        answers = pool.run(init_with_another_version, settings, size=size)
        for kind, ranks, text, _ in answers:
            assert (kind, ranks) == (Mismatch, (size - 1,)), text
            assert f"rank {size - 1} has tagi_ddp 99.0, rank 0 has {tagi_ddp.__version__}. " in text

    def test_late_for_init(self, pool: RankPool, size: int) -> None:
        settings = pool.settings(f"{size} ranks, but one")
        answers = pool.run(init_without_last, settings, size=size)[:-1]
        check_timeouts(answers, size - 1, "init")


class ClosedContract:
    """At every number of ranks."""

    def test_closed(self, pool: RankPool, size: int) -> None:
        for texts in pool.run(close, size=size, fresh=True):
            assert all("closed" in text for text in texts)


class FailuresContract:
    """At every number of ranks from 2 on; the last rank is the culprit."""

    def test_late(self, pool: RankPool, size: int, tmp_path: Path) -> None:
        self.check_late(pool, size, tmp_path, "all_reduce")

    @pytest.mark.slow
    @pytest.mark.parametrize("wait", WAITS)
    def test_late_for(self, pool: RankPool, size: int, tmp_path: Path, wait: str) -> None:
        self.check_late(pool, size, tmp_path, wait)

    def check_late(self, pool: RankPool, size: int, folder: Path, wait: str) -> None:
        options = {"size": size, "fresh": True, "timeout": LIMIT}
        *waiting, late = pool.run(come_late, WAITS[wait], folder, **options)
        name = "all_reduce" if wait == "asynchronous" else wait.removeprefix("large ")
        # A rank that began later than another may hear of the end earlier.
        assert max(first[3] for first, *_ in waiting) > LIMIT * 0.9
        for rank, (first, *later) in enumerate(waiting):
            kind, ranks, text, seconds = first
            assert (kind, ranks) == (Timeout, (size - 1,)), text
            assert f"{name} #1" in text
            assert f"rank {rank} of {size} ({pool.backend})" in text
            assert f"rank {size - 1} did not come within {LIMIT:g} s" in text
            assert seconds < LIMIT + SLACK
            for kind, ranks, text, seconds in later:
                assert (kind, ranks) == (Timeout, (size - 1,)), text
                assert seconds < SLACK
        for kind, ranks, text, seconds in late:
            assert kind is PeerLost, text
            assert ranks
            assert set(ranks) <= set(range(size - 1))
            assert seconds < SLACK

    def test_limit_of_one_call(self, pool: RankPool, size: int, tmp_path: Path) -> None:
        answers = pool.run(late_for_one, tmp_path, size=size, fresh=True)[:-1]
        check_timeouts(answers, size - 1, within_limit(pool))

    def test_those_that_wait_longer_are_not_blamed(
        self, pool: RankPool, size: int, tmp_path: Path
    ) -> None:
        answers = pool.run(give_up_first, tmp_path, size=size, fresh=True)[:-1]
        check_timeouts(answers, size - 1, within_limit(pool))

    def test_a_limit_that_is_set_later(self, pool: RankPool, size: int, tmp_path: Path) -> None:
        answers = pool.run(late_for_all, tmp_path, size=size, fresh=True)[:-1]
        check_timeouts(answers, size - 1, within_limit(pool))

    @pytest.mark.parametrize("what", DIFFERENT)
    def test_mismatch(self, pool: RankPool, size: int, what: str) -> None:
        for rank, (first, second) in enumerate(
            pool.run(make_calls_that_differ, *DIFFERENT[what], size=size, fresh=True)
        ):
            kind, ranks, text, seconds = first
            assert kind is Mismatch, text
            assert ranks
            assert f"rank {rank} of {size} ({pool.backend})" in text
            assert seconds < 5
            assert second[0] is Mismatch, "the communicator must be broken"

    @pytest.mark.parametrize("what", MESSAGES)
    def test_mismatch_of_a_message(self, pool: RankPool, size: int, what: str) -> None:
        answers = pool.run(misdirect, *MESSAGES[what], size=size, fresh=True)
        assert answers[1][:2] == (Mismatch, (0,)), answers[1]
        assert "recv #1 from rank 0" in answers[1][2]
        for kind, _, text, seconds in answers:
            assert issubclass(kind, Mismatch | PeerLost), text
            assert seconds < 5

    @pytest.mark.parametrize("wait", ["all_reduce", "large all_reduce", "barrier", "asynchronous"])
    def test_abort(self, pool: RankPool, size: int, wait: str) -> None:
        for answers in pool.run(give_up, WAITS[wait], size=size, fresh=True):
            for kind, ranks, text, seconds in answers:
                assert (kind, ranks) == (PeerLost, (size - 1,)), text
                assert "no more batches" in text
                assert seconds < 5

    def test_abort_that_blames_another(self, pool: RankPool, size: int) -> None:
        _, *others = pool.run(blame_another, size=size, fresh=True)
        for rank, (kind, ranks, text, seconds) in enumerate(others, 1):
            blamed = 0 if rank == size - 1 else size - 1  # who is blamed learns by whom
            assert (kind, ranks) == (PeerLost, (blamed,)), text
            assert "the last one is gone" in text
            assert seconds < 5

    def test_error_in_a_with_block(self, pool: RankPool, size: int) -> None:
        *others, culprit = pool.run(leave_with_error, size=size, fresh=True)
        assert "closed" in culprit
        for kind, ranks, text, _ in others:
            assert (kind, ranks) == (PeerLost, (size - 1,)), text
            assert "KeyError: 'weights'" in text

    def test_closed_early(self, pool: RankPool, size: int) -> None:
        *others, culprit = pool.run(close_early, size=size, fresh=True)
        assert "closed" in culprit
        for kind, ranks, text, seconds in others:
            assert (kind, ranks) == (PeerLost, (size - 1,)), text
            assert "closed" in text
            assert seconds < 5

    def test_forgotten(self, pool: RankPool, size: int) -> None:
        for kind, ranks, text, seconds in pool.run(forget_a_part, size=size, fresh=True)[:-1]:
            assert (kind, ranks) == (PeerLost, (size - 1,)), text
            assert seconds < 5

    def test_error_of_an_asynchronous_operation(self, pool: RankPool, size: int) -> None:
        for kind, ranks, text, seconds in pool.run(fail_later, size=size, fresh=True)[:-1]:
            assert (kind, ranks) == (PeerLost, (size - 1,)), text
            assert seconds < 5
