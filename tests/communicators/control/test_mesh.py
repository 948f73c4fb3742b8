"""Connections between ranks: strangers stay outside, and those that do not come are named."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest
from support.ipv6 import has_ipv6_loopback

from tagi_ddp.communicators.control import mesh
from tagi_ddp.communicators.control.channel import ControlChannel
from tagi_ddp.communicators.control.mesh import Listener
from tagi_ddp.communicators.control.notes import Failure, Notes, Series

Connections = dict[int, Connection]


@pytest.fixture
def listeners() -> Iterator[list[Listener]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(Listener())) for _ in range(3)]


def connect_all(listeners: list[Listener], **changes: object) -> list[Connections]:
    """Connect ranks, a thread each, by records with ``changes``."""
    records = [
        json.dumps({**json.loads(listener.record), **changes}).encode() for listener in listeners
    ]
    deadline = time.monotonic() + 20
    with ThreadPoolExecutor(len(listeners)) as threads:
        calls = [
            threads.submit(listener.connect, rank, records, deadline)
            for rank, listener in enumerate(listeners)
        ]
    results = [call.result() for call in calls]
    assert all(missing == [] for _, missing in results)
    return [connections for connections, _ in results]


def check_mesh(groups: list[Connections]) -> None:
    """Every two ranks hear each other; then close."""
    for rank, connections in enumerate(groups):
        assert sorted(connections) == [r for r in range(len(groups)) if r != rank]
        for peer, connection in connections.items():
            connection.send_bytes(bytes([rank]))
            assert groups[peer][rank].recv_bytes() == bytes([rank])
    for connections in groups:
        for connection in connections.values():
            connection.close()


def call(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", json.loads(listener.record)["port"]))


def test_strangers_stay_outside(listeners: list[Listener]) -> None:
    strangers = [call(listeners[0]) for _ in range(8)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n" * 10)  # a message that would be too long
    strangers[1].sendall(struct.pack("!i", 16) + b"x" * 16)  # no proof
    strangers[2].sendall(struct.pack("!i", 16) + b"x")  # a part of a message
    strangers[3].sendall(struct.pack("!i", -7))
    strangers[4].close()
    started = time.monotonic()
    check_mesh(connect_all(listeners))  # the others say nothing
    assert time.monotonic() - started < mesh._LIMIT / 2
    for stranger in strangers:
        stranger.close()


def test_a_guest_with_another_secret_is_refused(listeners: list[Listener]) -> None:
    with ThreadPoolExecutor(1) as thread:
        guest = Connection(call(listeners[0]).detach())
        answer = thread.submit(answer_challenge, guest, b"another secret")
        check_mesh(connect_all(listeners))
        with pytest.raises(AuthenticationError):
            answer.result()


def test_who_knows_the_record_but_not_the_secret_is_refused() -> None:
    listeners = [Listener(b"the job's secret", one_host=True) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for listener in listeners:
            stack.enter_context(contextlib.closing(listener))
        guest = stack.enter_context(Connection(call(listeners[0]).detach()))
        with ThreadPoolExecutor(1) as thread:
            key = mesh._key(b"", json.loads(listeners[0].record)["nonce"])
            answer = thread.submit(answer_challenge, guest, key)
            check_mesh(connect_all(listeners))
            with pytest.raises(AuthenticationError):
                answer.result()


def test_a_port_with_another_secret_is_no_rank(listeners: list[Listener]) -> None:
    one, two, impostor = listeners
    record = {**json.loads(one.record), "port": json.loads(impostor.record)["port"]}
    records = [json.dumps(record).encode(), two.record]
    impostor.accept(set(), time.monotonic())
    assert two.connect(1, records, time.monotonic() + 0.5) == ({}, [0])


def test_a_silent_port_is_no_rank(listeners: list[Listener]) -> None:
    records = [listener.record for listener in listeners[:2]]  # the first never answers
    started = time.monotonic()
    assert listeners[1].connect(1, records, started + 0.5) == ({}, [0])
    assert time.monotonic() - started < 1.5


def test_a_rank_may_call_again(listeners: list[Listener]) -> None:
    """A rank that gave up on a slow answer is the one of its later connection."""
    one, two, _ = listeners
    key = mesh._key(b"", json.loads(one.record)["nonce"])
    one.accept(set(), time.monotonic())
    guest = Connection(call(one).detach())
    answer_challenge(guest, key)
    deliver_challenge(guest, key)
    guest.send_bytes(struct.pack("!I", 1))
    with one._changed:
        assert one._changed.wait_for(lambda: 1 in one._accepted, 10)
        first = one._accepted[1]
    records = [one.record, two.record]
    found, missing = two.connect(1, records, time.monotonic() + 10)
    assert missing == []
    with one._changed:
        assert one._changed.wait_for(lambda: one._accepted[1] is not first, 10)
    found[0].send_bytes(b"hello")
    assert one._accepted[1].recv_bytes() == b"hello"


def test_missing_ranks_are_named(listeners: list[Listener]) -> None:
    records = [listener.record for listener in listeners]
    listeners[0].close()
    started = time.monotonic()
    assert listeners[1].connect(1, records, started + 0.5) == ({}, [0, 2])
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6")),
    ],
)
def test_addresses_of_both_families(listeners: list[Listener], address: str) -> None:
    groups = connect_all(listeners, host="elsewhere", addresses=[address])
    assert mesh.own_address(groups[0].values()) == address
    check_mesh(groups)


def test_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    listeners = [Listener() for _ in range(2)]
    assert all(listener._server.family == socket.AF_INET for listener in listeners)
    check_mesh(connect_all(listeners))
    for listener in listeners:
        listener.close()


def test_addresses_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    everywhere = mesh._addresses()
    assert not {"127.0.0.1", "::1"} & set(everywhere)
    assert not any(address.startswith("fe80") for address in everywhere)
    chosen = []
    for _, name in socket.if_nameindex():
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"none,{name}")
        chosen += mesh._addresses()
    assert sorted(chosen) == sorted(everywhere)


def channels_of(listeners: list[Listener]) -> list[ControlChannel]:
    connections = connect_all(listeners[:2])
    return [ControlChannel(each, rank, ["a", "a"]) for rank, each in enumerate(connections)]


@pytest.fixture
def channels(listeners: list[Listener]) -> Iterator[tuple[ControlChannel, ControlChannel]]:
    one, two = channels_of(listeners)
    yield one, two
    two.close()
    one.close()


Channels = tuple[ControlChannel, ControlChannel]


def enter(channel: ControlChannel, number: int, content: bytes = b"") -> None:
    with channel.sending() as notes:
        notes.enter([1], Series.COLLECTIVE, number, content)


def test_messages(channels: Channels) -> None:
    one, two = channels
    soon = time.monotonic() + 10
    large = threading.Thread(target=enter, args=(one, 7, b"x" * 10_000_000))
    large.start()  # what both have in their buffers is less
    assert two.until(lambda: bool(two.notes.entered), soon)
    large.join()
    with one.sending() as notes:
        notes.keep("key", b"value")
    one.fail(Failure("Timeout", (1,), "tired"))
    assert two.until(lambda: bool(two.notes.failures), soon)
    assert two.notes.entered == {(0, Series.COLLECTIVE, 7): b"x" * 10_000_000}
    assert two.notes.values == {"key": b"value"}
    assert two.notes.failures == {0: Failure("Timeout", (1,), "tired")}
    assert not two.until(lambda: False, time.monotonic() + 0.05)


def test_a_goodbye_is_no_death(listeners: list[Listener]) -> None:
    one, two = channels_of(listeners)
    enter(one, 1)  # which the other may not have read
    two.close()
    assert one.until(lambda: bool(one.notes.closed), time.monotonic() + 10)
    assert not one.until(lambda: bool(one.notes.died), time.monotonic() + 0.1)
    one.close()


def test_messages_are_passed_on_by_who_does_not_wait() -> None:
    """Ranks 0 and 5 of ten are no neighbours, and nobody between them calls anything."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(contextlib.closing(Listener())) for _ in range(10)]
        channels = [
            ControlChannel(each, rank, ["a"] * 10)
            for rank, each in enumerate(connect_all(listeners))
        ]
        for channel in channels:
            stack.callback(channel.close)
        assert 5 not in channels[0]._connections
        with channels[0].sending() as notes:
            notes.enter([5], Series.SEND, 1, b"here")
        notes = channels[5].notes
        assert channels[5].until(lambda: bool(notes.entered), time.monotonic() + 10)
        assert notes.entered == {(0, Series.SEND, 1): b"here"}
        with channels[5].sending() as notes:
            notes.leave(Series.COLLECTIVE, 3)
            notes.acknowledge()
        assert channels[5].until(lambda: notes.acknowledged == -1, 0.0)
        for channel in channels:
            with channel.sending() as each:
                each.leave(Series.COLLECTIVE, 3)
        assert channels[5].until(lambda: notes.acknowledged == 3, time.monotonic() + 10)


def test_all_that_has_come_is_read_at_first(channels: Channels) -> None:
    one, two = channels
    for number in range(100):
        enter(one, number)
    time.sleep(0.1)
    assert two.until(lambda: True, 0.0)
    assert len(two.notes.entered) == 100


def test_a_message_in_pieces(channels: Channels) -> None:
    one, two = channels
    notes = Notes(0, 2)
    notes.enter([1], Series.COLLECTIVE, 5, b"")
    ((_, content),) = notes.outbox
    content = struct.pack("!I", len(content)) + content  # one of several that are sent together
    message = struct.pack("!i", len(content)) + content
    for piece in (message[:2], message[2:9]):
        os.write(one._connections[1].fileno(), piece)
        time.sleep(0.1)
        assert not two.notes.entered
    os.write(one._connections[1].fileno(), message[9:])
    assert two.until(lambda: bool(two.notes.entered), time.monotonic() + 10)
    assert not two.notes.died


def test_messages_that_are_sent_together(channels: Channels) -> None:
    one, two = channels
    for number in range(3):
        with one.sending(most_held=2) as notes:
            notes.enter([1], Series.COLLECTIVE, number, bytes(number))
        assert bool(notes.outbox) is (number < 2)
    came = two.notes.entered
    assert two.until(lambda: len(came) == 3, time.monotonic() + 10)
    assert came == {(0, Series.COLLECTIVE, number): bytes(number) for number in range(3)}


def test_nonsense_ends_a_connection(channels: Channels) -> None:
    one, two = channels
    one._connections[1].send_bytes(b"nonsense")
    assert two.until(lambda: two.notes.died == {0}, time.monotonic() + 10)


def test_a_partial_message_blocks_no_reader_for_ever(channels: Channels) -> None:
    """A rank that is stopped within a message counts as lost when its limit is over."""
    one, two = channels
    mesh.set_limit(two._connections[0], 2.0)
    os.write(one._connections[1].fileno(), struct.pack("!i", 1000) + b"\x01")
    started = time.monotonic()
    reader = threading.Thread(target=two.until, args=(lambda: bool(two.notes.died), started + 20))
    reader.start()
    time.sleep(0.1)
    assert not two.until(lambda: False, time.monotonic() + 0.1), "another thread goes on"
    assert time.monotonic() - started < 2
    reader.join(20)
    assert two.notes.died == {0}
    assert 1.9 < time.monotonic() - started < 10


def test_a_rank_that_takes_nothing_blocks_no_sender_for_ever(channels: Channels) -> None:
    one, two = channels
    two._closing = True  # its own thread reads no more
    os.eventfd_write(two._alarm, 1)
    two._helper.close()
    mesh.set_limit(one._connections[1], 0.3)
    enter(one, 1, b"x" * 50_000_000)
    assert one.until(lambda: one.notes.died == {1}, time.monotonic() + 10)
