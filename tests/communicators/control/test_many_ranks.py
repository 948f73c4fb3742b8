"""Ranks that are no neighbours in the side channel: they hear of each other by way of others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.data import announce, await_ranks
from contract.failures import Report, ones, report
from support.rank_pool import Died, RankPool

from tagi_ddp.communicators import Mismatch, PeerLost, Timeout
from tagi_ddp.communicators.control.overlay import neighbours
from tagi_ddp.communicators.errors import forwarded, mismatch_text, own_call, timeout_text

SIZE = 20
END = 2.0  # seconds in which all end when one dies
LIMIT = 3.0  # of the communicator, in seconds, where one does not come


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    pool = RankPool("gloo", SIZE, environment={"TAGI_DDP_TWO_LEVELS": "0"})
    yield pool
    pool.close()


def sockets() -> int:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        if path.exists() or path.is_symlink():
            try:
                links.append(os.readlink(path))
            except FileNotFoundError:  # of the folder that was read
                continue
    return sum(link.startswith("socket:") for link in links)


def use_all_operations(comm: Any) -> int:
    rank, size = comm.rank, comm.size
    opposite = (rank + size // 2) % size
    assert opposite not in neighbours(rank, size)
    for _ in range(3):
        total = np.full(5, rank, np.float64)
        comm.all_reduce(total)
        assert total.tolist() == [size * (size - 1) / 2] * 5
    out = np.empty(size)
    comm.all_to_all(np.arange(size) * 100.0 + rank, out)
    assert out.tolist() == [100.0 * rank + other for other in range(size)]
    came = np.empty(1)
    if rank < opposite:
        comm.send(np.array([rank * 1.0]), opposite)
        comm.recv(came, opposite)
    else:
        comm.recv(came, opposite)
        comm.send(np.array([rank * 1.0]), opposite)
    assert came == opposite
    with comm.split(rank % 2, -rank) as part:
        assert part.size == size // 2
        assert part.rank == (size - 1 - rank) // 2
        total = np.array([rank * 1.0])
        part.all_reduce(total)
        assert total == sum(range(rank % 2, size, 2))
    return len(comm._channel._connections)


def test_all_operations(many: RankPool) -> None:
    assert many.run(use_all_operations, limit=60) == [10] * SIZE


def init_another(comm: Any, timeout: float) -> tuple[float, int, int]:
    from tagi_ddp import init

    before, began = sockets(), time.monotonic()
    with init("gloo", comm.rank, comm.size, job="another", timeout=timeout) as other:
        other.barrier()
        seconds = time.monotonic() - began
        return seconds, sockets() - before, len(other._channel._connections)


@pytest.mark.slow
def test_sixty_four_ranks() -> None:
    pool = RankPool("gloo", 64, environment={"TAGI_DDP_TWO_LEVELS": "0"})
    try:
        results = pool.run(init_another, 60.0, limit=200, timeout=100)
        assert {connections for *_, connections in results} == {15}
        assert max(count for _, count, _ in results) < 64, "gloo connects when it must"
        killed = pool.run(die_while_others_wait, 41, limit=60, dying=[41], timeout=100)
        check_death(killed, 41)
    finally:
        pool.close()


def call_a_barrier_on_one_rank(comm: Any) -> Report:
    return report(lambda: comm.barrier() if comm.rank == 13 else comm.all_reduce(ones()))


def test_a_rank_that_differs_is_named(many: RankPool) -> None:
    answers = many.run(call_a_barrier_on_one_rank, fresh=True)
    assert {kind for kind, *_ in answers} == {Mismatch}
    assert all(ranks == (13,) for rank, (_, ranks, *_) in enumerate(answers) if rank != 13)


def late(comm: Any, folder: Path) -> Report:
    if comm.rank == 7:
        await_ranks(folder, set(range(SIZE)) - {7})
    answer = report(lambda: comm.all_reduce(ones(), timeout=LIMIT))
    announce(folder, comm.rank)
    return answer


def test_a_rank_that_is_late_is_named(many: RankPool, tmp_path: Path) -> None:
    answers = many.run(late, tmp_path, fresh=True)
    for rank, (kind, ranks, text, _) in enumerate(answers):
        if rank == 7:
            assert kind is PeerLost
            assert set(ranks) <= set(range(SIZE)) - {7}
        else:
            assert (kind, ranks) == (Timeout, (7,)), text


def stop(comm: Any) -> Report | None:
    """Rank 4, between others, is stopped: it passes nothing on."""
    comm.barrier()
    if comm.rank == 4:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    return report(lambda: comm.barrier(timeout=LIMIT))


def test_a_rank_that_is_stopped_is_the_only_one_to_blame(many: RankPool) -> None:
    answers = many.run(stop, fresh=True, silent=[4])
    for rank, answer in enumerate(answers):
        if rank != 4:
            assert answer is not None
            kind, ranks, text, _ = answer
            assert (kind, ranks) == (Timeout, (4,)), text


def die_while_others_wait(comm: Any, victim: int) -> Report:
    comm.all_reduce(ones())
    if comm.rank == victim:
        time.sleep(0.5)  # the others wait
        os.kill(os.getpid(), signal.SIGKILL)
    return report(lambda: comm.all_reduce(ones(100_000)))


def check_death(answers: list[Any], victim: int) -> None:
    for rank, answer in enumerate(answers):
        if rank == victim:
            assert isinstance(answer, Died)
        else:
            kind, ranks, text, seconds = answer
            assert (kind, ranks) == (PeerLost, (victim,)), text
            assert seconds < 0.5 + END


def test_a_death_is_heard_by_all(many: RankPool) -> None:
    check_death(many.run(die_while_others_wait, 11, fresh=True, dying=[11]), 11)


def leave(comm: Any) -> Report:
    if comm.rank == 3:
        comm.all_reduce(ones())
        raise ValueError("a mistake")
    comm.all_reduce(ones())
    return report(lambda: comm.barrier())


def test_an_error_is_told_to_all(many: RankPool) -> None:
    def fail(comm: Any) -> Report | None:
        try:
            with comm:
                return leave(comm)
        except ValueError:
            return None

    for rank, answer in enumerate(many.run(fail, fresh=True)):
        if rank != 3:
            assert answer is not None
            kind, ranks, text, _ = answer
            assert (kind, ranks) == (PeerLost, (3,))
            assert "rank 3 gave up: ValueError: a mistake" in text


def test_what_the_others_called_is_read_from_their_own_words() -> None:
    call = "all_reduce(float32[8], op=sum)"
    text = mismatch_text({1: "broadcast(float32[8], root=0)", 2: "barrier()"}, call)
    assert own_call(text) == call
    assert own_call(forwarded(Mismatch, [1], 5, text, 0)) is None, "those of rank 5"
    assert own_call(timeout_text([1], 3.0)) is None
