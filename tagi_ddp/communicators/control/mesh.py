"""One TCP connection between every two ranks of a group, which no stranger can join."""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_SIOCGIFADDR = 0x8915
_RANK = struct.Struct("!I")
_PROOF = 32  # bytes of a SHA-256
_HELLO = _RANK.size + _PROOF
_CONFIRM = b"!"
_ATTEMPT = 3.0  # seconds for one address, which a firewall may swallow


class Listener:
    """A rank's open port, for the time that the others need to connect to it."""

    def __init__(self) -> None:
        """Listen on every interface of this host."""
        self._socket = socket.create_server(("", 0), backlog=4096)
        self._secret = secrets.token_bytes(16)
        self._accepted: dict[int, socket.socket] = {}
        self.record = json.dumps(
            {
                "host": _host_id(),
                "addresses": _addresses(),
                "port": self._socket.getsockname()[1],
                "secret": self._secret.hex(),
            }
        ).encode()
        """What the other ranks must know; it holds the secret that admits them."""

    def __enter__(self) -> Listener:
        """Return the listener itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the port."""
        self._socket.close()

    def connect(
        self, rank: int, records: Sequence[bytes], deadline: float
    ) -> tuple[dict[int, socket.socket], list[int]]:
        """Connect this rank to all others; return the sockets by rank, and the ranks missing.

        ``records`` holds the record of every rank, in rank order. Ranks below this one are called,
        those above call.
        """
        above = set(range(rank + 1, len(records)))
        door = threading.Thread(target=self._admit, args=(above, deadline), daemon=True)
        door.start()
        sockets: dict[int, socket.socket] = {}
        for peer in range(rank):
            found = _call(rank, json.loads(records[peer]), deadline)
            if found is not None:
                sockets[peer] = found
        door.join()
        sockets.update(self._accepted)
        for connection in sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sockets, [r for r in range(len(records)) if r != rank and r not in sockets]

    def _admit(self, expected: set[int], deadline: float) -> None:
        """Accept until all ``expected`` ranks are here; those without a proof are shown out.

        A guest says hello with its rank and a proof, is answered with a proof, and confirms.
        """
        guests: dict[socket.socket, bytes] = {}
        with selectors.DefaultSelector() as selector:
            self._socket.setblocking(False)
            selector.register(self._socket, selectors.EVENT_READ)
            while expected and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is self._socket:
                        with contextlib.suppress(OSError):
                            guest, _ = self._socket.accept()
                            guest.setblocking(False)
                            guests[guest] = b""
                            selector.register(guest, selectors.EVENT_READ)
                        continue
                    guest = key.fileobj
                    assert isinstance(guest, socket.socket)
                    with contextlib.suppress(OSError):
                        if self._listen_to(guest, guests):
                            continue
                    selector.unregister(guest)
                    said = guests.pop(guest)
                    if len(said) > _HELLO:
                        (rank,) = _RANK.unpack_from(said)
                        self._accepted[rank] = guest
                        expected.discard(rank)
                    else:
                        guest.close()
        for guest in guests:
            guest.close()

    def _listen_to(self, guest: socket.socket, guests: dict[socket.socket, bytes]) -> bool:
        """Read and answer what ``guest`` says; return whether there is more to hear."""
        proved = len(guests[guest]) == _HELLO
        data = guest.recv(len(_CONFIRM) if proved else _HELLO - len(guests[guest]))
        guests[guest] += data
        said = guests[guest]
        if len(said) != _HELLO or not data:
            return len(data) > 0 and len(said) < _HELLO
        name, proof = said[: _RANK.size], said[_RANK.size :]
        if not hmac.compare_digest(proof, _proof(self._secret, b"hello" + name)):
            return False
        guest.send(_proof(self._secret, b"welcome" + name))
        return True


def _call(rank: int, record: dict[str, object], deadline: float) -> socket.socket | None:
    """Try the addresses of ``record`` until the one with the right proof answers."""
    secret, port = bytes.fromhex(str(record["secret"])), int(str(record["port"]))
    name = _RANK.pack(rank)
    addresses = [str(address) for address in record["addresses"]]  # type: ignore[attr-defined]
    if record["host"] == _host_id():
        addresses.insert(0, "127.0.0.1")
    while (left := deadline - time.monotonic()) > 0:
        for address in addresses:
            connection = None
            try:
                connection = socket.create_connection((address, port), min(_ATTEMPT, left))
                connection.sendall(name + _proof(secret, b"hello" + name))
                answer = _receive(connection, _PROOF)
                if hmac.compare_digest(answer, _proof(secret, b"welcome" + name)):
                    connection.sendall(_CONFIRM)
                    return connection
            except OSError:
                pass
            if connection is not None:
                connection.close()
        time.sleep(0.05)
    return None


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            break
        data += part
    return data


def _proof(secret: bytes, text: bytes) -> bytes:
    return hmac.digest(secret, text, "sha256")


def _host_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _addresses() -> list[str]:
    """Return this host's IPv4 addresses that other hosts may reach.

    GLOO_SOCKET_IFNAME, a list of interfaces, restricts them.
    """
    chosen = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if chosen and name not in chosen:
                continue
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not address.startswith("127.")]
