"""Ranks that connect to one that has given its address, and does not answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Barrier
from time import monotonic

import pytest

from tagi_ddp.communicators import Timeout
from tagi_ddp.communicators.control.mesh import Listener, host_id
from tagi_ddp.communicators.network.checked import open_channel
from tagi_ddp.communicators.operations import Call

LIMIT = 1.0


@pytest.mark.parametrize("silent", [0, 1, 2])
def test_it_is_named_by_all(silent: int) -> None:
    present = [rank for rank in range(3) if rank != silent]
    there = Barrier(2)
    records: list[dict[int, bytes]] = [{}]

    def exchange_of(rank: int) -> Callable[[bytes], Sequence[bytes]]:
        rounds = iter(records)

        def exchange(record: bytes) -> Sequence[bytes]:
            told = next(rounds)
            told[rank] = record
            there.wait(10)
            return [told[each] for each in range(3)]

        return exchange

    def connect(rank: int) -> Timeout:
        call = Call("init", "", LIMIT, deadline=monotonic() + LIMIT)
        where = f"init on rank {rank} of 3 (gloo)"
        with pytest.raises(Timeout) as caught:
            open_channel(where, rank, [host_id()] * 3, call, exchange_of(rank))
        return caught.value

    with closing(Listener(b"", one_host=True)) as listener, ThreadPoolExecutor(2) as pool:
        records[0][silent] = listener.record
        for rank, error in zip(present, pool.map(connect, present), strict=True):
            assert silent in error.ranks  # and who waits for that one, maybe
            assert f"init on rank {rank} of 3 (gloo): rank" in str(error)
