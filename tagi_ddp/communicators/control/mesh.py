"""Authenticated TCP connections between the neighbours of a group (`overlay`).

Each rank listens, and publishes its address in a record. `multiprocessing.connection` frames the
messages and proves to each side that the other has a key, made of the record and the job's secret.
Without a secret, no stranger may be able to read the records. Only bytes are received: nothing is
unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from ipaddress import IPv6Address, ip_address
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TypedDict

from tagi_ddp.communicators.control.overlay import neighbours
from tagi_ddp.communicators.operations import start_thread

_SIOCGIFADDR = 0x8915
_RANK = struct.Struct("!I")
_ATTEMPT = 3.0  # seconds to connect to one address, of which a firewall may drop packets
_LIMIT = 10.0  # seconds of one read or write: messages are small, so only a stopped rank is slow
# Seconds after which a host is gone whose kernel is silent; it answers for a stopped process.
SILENCE = 20
# The errors that strangers cause by silence, an early end, foreign bytes or a wrong secret.
_REFUSED = (OSError, EOFError, AssertionError, AuthenticationError, ValueError, struct.error)


class Record(TypedDict):
    """The addresses of a rank, and the public part of its key."""

    host: str
    addresses: list[str]
    port: int
    nonce: str


class Listener:
    """The open port of a rank while the others connect to it.

    Args:
        secret: the job's, if strangers may read records; else b"".
        one_host: all ranks are on this host; only its loopback interface listens.
        port: the port to listen on; 0: any free one.
        nonce: distinguishes keys of the same secret; "": a random one.
    """

    def __init__(
        self, secret: bytes = b"", one_host: bool = False, port: int = 0, nonce: str = ""
    ) -> None:
        """Listen on all interfaces of this host, or on the loopback interface alone."""
        self._server = _open_port(one_host, port)
        self._secret = secret
        nonce = nonce or secrets.token_hex(32)
        self._key = _key(secret, nonce)
        self._accepted: dict[int, Connection] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._acceptor: threading.Thread | None = None
        port = self._server.getsockname()[1]
        addresses = [] if one_host else _addresses()
        record = Record(host=host_id(), addresses=addresses, port=port, nonce=nonce)
        self.record = json.dumps(record).encode()
        """The record of this rank, which the others need."""

    def close(self) -> None:
        """Close the port; callers that are not accepted yet are refused."""
        with self._changed:
            self._closed = True
        if self._acceptor is not None:
            with contextlib.suppress(OSError):
                self._server.shutdown(socket.SHUT_RDWR)  # It wakes the thread.
            self._acceptor.join()
        self._server.close()

    def connect(
        self, rank: int, records: Sequence[bytes], deadline: float
    ) -> tuple[dict[int, Connection], list[int]]:
        """Connect this rank to its neighbours; return the connections by rank, and those missing.

        ``records`` holds the record of every rank, in rank order. This rank calls those below it;
        those above call.
        """
        others = neighbours(rank, len(records))
        above = {r for r in others if r > rank}
        if above:
            self._start_accepting()
        called = {
            r: call(rank, json.loads(records[r]), self._secret, deadline)
            for r in others
            if r < rank
        }
        found = {peer: connection for peer, connection in called.items() if connection is not None}
        found |= self._await(above, deadline)
        return found, [r for r in others if r not in found]

    def accept(self, ranks: set[int], deadline: float) -> dict[int, Connection]:
        """Return the connections of the ``ranks`` that have called before the deadline."""
        self._start_accepting()
        return self._await(ranks, deadline)

    def _start_accepting(self) -> None:
        if self._acceptor is None:
            self._acceptor = start_thread(self._accept)

    def _await(self, ranks: set[int], deadline: float) -> dict[int, Connection]:
        with self._changed:
            left = max(0.0, deadline - time.monotonic())
            self._changed.wait_for(lambda: ranks <= self._accepted.keys(), left)
            found, self._accepted = self._accepted, {}
        return found

    def _accept(self) -> None:
        """Give each caller a thread until the port closes: a silent one delays no other."""
        while not self._closed:
            try:
                caller, _ = self._server.accept()
                start_thread(self._authenticate, caller)
            except (OSError, RuntimeError):  # It is gone, or the system has no thread left now.
                time.sleep(0.01)

    def _authenticate(self, caller: socket.socket) -> None:
        """Accept a caller that has the secret as the rank whose number it sends."""
        connection = _connection(caller, _LIMIT)
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            (rank,) = _RANK.unpack(connection.recv_bytes(_RANK.size))
        except _REFUSED:
            connection.close()
            return
        with self._changed:
            if not self._closed:  # A rank that calls twice uses the later connection.
                self._accepted[rank] = connection
                self._changed.notify_all()


def _key(secret: bytes, nonce: str) -> bytes:
    """Return the key of a rank, which it and its callers prove to have."""
    return hmac.digest(secret, nonce.encode(), "sha256")


def call(rank: int, record: Record, secret: bytes, deadline: float) -> Connection | None:
    """Try the addresses of ``record`` until the rank that has its key answers."""
    here = ["127.0.0.1", "::1"] if record["host"] == host_id() else []
    key, port = _key(secret, record["nonce"]), record["port"]
    while time.monotonic() < deadline:
        for address in [*here, *record["addresses"]]:
            limit = min(_ATTEMPT, max(0.01, deadline - time.monotonic()))
            with contextlib.suppress(*_REFUSED):
                return _introduce(rank, (address, port), key, limit)
        time.sleep(0.05)
    return None


def _introduce(rank: int, address: tuple[str, int], key: bytes, limit: float) -> Connection:
    """Return a connection to the listener that has ``key``; raise one of _REFUSED."""
    connection = _connection(socket.create_connection(address, limit), limit)
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        set_limit(connection, _LIMIT)
        connection.send_bytes(_RANK.pack(rank))
    except BaseException:
        connection.close()
        raise
    return connection


# Socket options of connections.


def _connection(connected: socket.socket, limit: float) -> Connection:
    """Take over a socket; no read or write takes longer than ``limit`` seconds."""
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        connected.setsockopt(socket.IPPROTO_TCP, option, max(1, SILENCE // 4))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENCE)
    connection = Connection(connected.detach())
    set_limit(connection, limit)
    return connection


@contextlib.contextmanager
def _socket_of(connection: Connection) -> Iterator[socket.socket]:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        yield same


def set_limit(connection: Connection, seconds: float) -> None:
    """Limit the time of a single read or write, which then raises OSError."""
    limit = struct.pack("ll", *divmod(max(1, round(seconds * 1e6)), 1_000_000))
    with _socket_of(connection) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def cut(connection: Connection) -> None:
    """End a connection for both sides: the next reads find the end."""
    with contextlib.suppress(OSError), _socket_of(connection) as same:
        same.shutdown(socket.SHUT_RDWR)


def own_address(connections: Iterable[Connection]) -> str:
    """Return the address by which ranks on other hosts, if there are any, reach this one."""
    found = ["127.0.0.1"]
    for connection in connections:
        with _socket_of(connection) as same:
            address = ip_address(same.getsockname()[0])
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        found.append(str(mapped or address))
    return best_address(found[1:] or found)


def best_address(addresses: Iterable[str]) -> str:
    """Return the address that all ranks of a host use.

    All choose the same one: a library may not connect addresses of two families.
    """

    def preference(text: str) -> tuple[bool, int, str]:
        address = ip_address(text)
        return address.is_loopback, address.version, text

    return min(addresses, key=preference)


# This host.


def _open_port(one_host: bool, port: int) -> socket.socket:
    """Return a listening socket, for IPv4 and IPv6 where the machine has both."""
    if one_host:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", port), backlog=4096)
        return socket.create_server(("::1", port), family=socket.AF_INET6, backlog=4096)
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True
            )
    return socket.create_server(("", port), backlog=4096)


def host_id() -> str:
    """Return an identifier of this host, or of a container with a network of its own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def chosen_interfaces() -> list[str]:
    """Return the interfaces that GLOO_SOCKET_IFNAME lists; none: all of this host."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def _addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one, those of IPv4 first.

    GLOO_SOCKET_IFNAME restricts them.
    """
    chosen = chosen_interfaces()
    names = [name for _, name in socket.if_nameindex() if not chosen or name in chosen]
    return [*_ipv4_addresses(names), *_ipv6_addresses(names)]


def _ipv4_addresses(interfaces: Iterable[str]) -> Iterator[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in interfaces:
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # This interface has no address.
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                address = ip_address(answer[20:24])
                if not address.is_loopback:
                    yield str(address)


def _ipv6_addresses(interfaces: Sequence[str]) -> Iterator[str]:
    """Yield global addresses: those of a link have no meaning on another host."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ip_address(bytes.fromhex(digits))
            if name in interfaces and not (address.is_loopback or address.is_link_local):
                yield str(address)
