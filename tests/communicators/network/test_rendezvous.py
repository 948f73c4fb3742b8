"""Ranks over gloo that lose the store at which they meet blame rank 0."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress

import pytest
from support.rank_pool import free_port
from torch._C._distributed_c10d import TCPStore

from tagi_ddp.communicators import PeerLost, Timeout
from tagi_ddp.communicators.network.rendezvous import connect

SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
print("ready", flush=True)
time.sleep(60)
"""


def test_a_store_that_is_lost_is_rank_0s_loss() -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        killer = threading.Timer(0.3, server.kill)
        killer.start()
        with pytest.raises(PeerLost, match="the store of the ranks' rendezvous is gone") as caught:
            connect(store, 1, 2, 30.0)
        killer.join()
    assert caught.value.ranks == (0,)


def come_and_lose(store: TCPStore) -> None:
    with suppress(PeerLost):
        connect(store, 0, 3, 20.0)


def test_a_store_that_is_lost_near_the_limit_hides_no_rank_that_is_late() -> None:
    """Rank 0 comes to its own limit a moment earlier, and takes its store with it."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        stores = [TCPStore("127.0.0.1", port, None, False, wait_for_workers=False) for _ in "ab"]
        first = threading.Thread(target=come_and_lose, args=(stores[0],))
        first.start()  # so that its record is there
        killer = threading.Timer(1.8, server.kill)
        killer.start()
        with pytest.raises(Timeout, match="rank 2 did not come") as caught:
            connect(stores[1], 1, 3, 2.0)
        killer.join()
        first.join()
    assert caught.value.ranks == (2,)
