"""A rank's connection to its launcher.

It is a socket that only the rank and its launcher have, so its end is the end of the rank. Each
message is one packet of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import select
import socket
import time
from dataclasses import asdict
from typing import Any

from tagi_ddp.elastic.messages import Assignment, Call, JoinRequest

_MOST_BYTES = 1 << 16  # the limit of a message
_SLACK = 30.0  # seconds that the launcher may take to leave out ranks that did not join in time


class LauncherConnection:
    """A rank's connection to the launcher of its job."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._call: Call | None = None

    def called(self, progress: int, exchanging: bool) -> bool:
        """Return whether this rank, with ``progress`` updates, should join the next group now.

        It should when ``exchanging``, or if a waiting rank has fewer updates; not for new ranks.
        """
        call = self._last_call()
        if call is None or call.joins:
            return False
        return exchanging or (call.progress is not None and call.progress < progress)

    @property
    def awaited(self) -> bool:
        """True if new ranks wait to join, and there is no other reason for a group."""
        call = self._last_call()
        return call is not None and call.joins

    def join(self, request: JoinRequest) -> Assignment | None:
        """Join the next group; return the assignment in it, or None if all ranks are done.

        Raise ConnectionError if the launcher is gone, TimeoutError if it does not answer.
        """
        limit = request.patience + _SLACK
        self._connection.send(json.dumps({"join": asdict(request)}).encode())
        deadline = time.monotonic() + limit
        while self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = self._receive()
            if "assignment" in message:
                self._call = None
                return Assignment.of(message["assignment"])
            if "over" in message:
                return None
        raise TimeoutError(f"the launcher did not answer within {limit:g} s")

    def outlive(self, value: bool) -> None:
        """Set whether this rank goes on when another rank with this setting is lost."""
        with contextlib.suppress(OSError):  # This rank ends with the launcher.
            self._connection.send(json.dumps({"outlives": value}).encode())

    def ask_for_grace(self, seconds: float) -> None:
        """Ask for so many seconds between SIGTERM and SIGKILL, for this process alone at first."""
        with contextlib.suppress(OSError):
            self._connection.send(json.dumps({"grace": seconds}).encode())

    def _last_call(self) -> Call | None:
        """Return the launcher's last call since this rank joined its group."""
        while self._poll.poll(0):
            message = self._receive()
            if "call" in message:
                self._call = Call(**message["call"])
        return self._call

    def _receive(self) -> dict[str, Any]:
        data = self._connection.recv(_MOST_BYTES)
        if not data:
            raise ConnectionError("the launcher of this job is gone")
        message: dict[str, Any] = json.loads(data)
        return message


_connection: LauncherConnection | None = None


def open_launcher_connection(descriptor: int) -> None:
    """Open this process's connection to its launcher, before anything else runs."""
    global _connection
    connection = socket.socket(fileno=descriptor)
    _connection = LauncherConnection(connection)
    # The kernel closes it, as its end means the rank's end. Without this, Python warns at exit.
    atexit.register(connection.detach)


def launcher_connection() -> LauncherConnection | None:
    """Return this process's connection to its launcher; None if it has none."""
    return _connection
