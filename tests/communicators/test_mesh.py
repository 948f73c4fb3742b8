"""Connections between ranks: strangers stay outside, and those that do not come are named."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from tagi_ddp.communicators.control.channel import ControlChannel, Failure, Kind, Series
from tagi_ddp.communicators.control.mesh import Listener


def connect_all(listeners: list[Listener], seconds: float = 10) -> list[dict[int, socket.socket]]:
    records = [listener.record for listener in listeners]
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(len(listeners)) as threads:
        calls = [
            threads.submit(listener.connect, rank, records, deadline)
            for rank, listener in enumerate(listeners)
        ]
    results = [call.result() for call in calls]
    assert all(missing == [] for _, missing in results)
    return [sockets for sockets, _ in results]


def close(groups: list[dict[int, socket.socket]], listeners: list[Listener]) -> None:
    for sockets in groups:
        for connection in sockets.values():
            connection.close()
    for listener in listeners:
        listener.__exit__(None, None, None)


def test_strangers_stay_outside() -> None:
    listeners = [Listener() for _ in range(3)]
    port = json.loads(listeners[0].record)["port"]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(4)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n" * 10)  # no proof
    strangers[1].sendall(b"\0\0\0\1")  # not all of it
    strangers[2].close()
    groups = connect_all(listeners)  # strangers[3] says nothing
    for rank, sockets in enumerate(groups):
        assert sorted(sockets) == [r for r in range(3) if r != rank]
        for peer, connection in sockets.items():
            connection.sendall(bytes([rank]))
            assert groups[peer][rank].recv(10) == bytes([rank])
    for stranger in strangers:
        stranger.close()
    close(groups, listeners)


def test_another_rank_at_the_port_is_no_rank() -> None:
    """A port that answers without the proof is not taken for the rank that should be there."""
    one, two, impostor = Listener(), Listener(), Listener()
    record = json.loads(one.record)
    record["port"] = json.loads(impostor.record)["port"]
    door = threading.Thread(target=impostor._admit, args=({1}, time.monotonic() + 1))
    door.start()
    records = [json.dumps(record).encode(), two.record]
    sockets, missing = two.connect(1, records, time.monotonic() + 0.5)
    door.join()
    assert (sockets, missing) == ({}, [0])
    close([], [one, two, impostor])


def test_missing_ranks_are_named() -> None:
    listeners = [Listener() for _ in range(3)]
    records = [listener.record for listener in listeners]
    listeners[0].__exit__(None, None, None)
    started = time.monotonic()
    sockets, missing = listeners[1].connect(1, records, started + 0.5)
    assert (sockets, missing) == ({}, [0, 2])
    assert time.monotonic() - started < 5
    close([], listeners[1:])


def test_notes() -> None:
    listeners = [Listener() for _ in range(2)]
    one, two = (ControlChannel(sockets) for sockets in connect_all(listeners))
    soon = time.monotonic() + 10
    one.send([1], Kind.ENTER, Series.COLLECTIVE, 7, b"x" * 1_000_000)  # in many pieces
    one.send_failure(Failure("Timeout", (1,), "tired"))
    assert two.until(lambda: bool(two.failures), soon)
    assert two.entered == {(0, Series.COLLECTIVE, 7): b"x" * 1_000_000}
    assert two.failures == {0: Failure("Timeout", (1,), "tired")}
    assert not two.until(lambda: False, time.monotonic() + 0.05)
    two.close()
    assert one.until(lambda: bool(one.closed), soon)
    assert one.died == set()
    one.close()
    close([], listeners)
