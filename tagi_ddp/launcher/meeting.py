"""Messages between a rank and the launcher of its elastic job, and the rank's side of them.

They use a socket that only the rank and its launcher have, so its end is the end of the rank. Each
message is one packet of JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tagi_ddp.launcher.roll_call import Call

MOST_BYTES = 1 << 16  # the limit of a message
_SLACK = 30.0  # seconds that the launcher may take to leave out ranks that did not join in time


@dataclass(frozen=True)
class Assignment:
    """A rank's number in its next group, and the group.

    number: of the group. source: the rank with the latest state; behind: the ranks that copy it.
    stayed: the number of ranks, the first ones, that were in the group before. address, port: at
    which rank 0 can listen and all ranks reach it.
    """

    number: int
    rank: int
    size: int
    local_rank: int
    local_size: int
    source: int
    behind: tuple[int, ...]
    stayed: int
    address: str
    port: int

    @classmethod
    def of(cls, values: dict[str, Any]) -> Assignment:
        """Return the assignment of a `message`."""
        return cls(**{**values, "behind": tuple(values["behind"])})

    def enter(self, job: str) -> None:
        """Set the environment of this process to the assignment, in a group of ``job``."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size)
        name = f"{job}/{self.number}"  # Groups of different names do not connect.
        os.environ.update(variables(*numbers, name, self.address, self.port))

    def message(self) -> str:
        """Return the assignment as a message to the rank."""
        return json.dumps({"seat": asdict(self)})


def variables(
    rank: int, size: int, local_rank: int, local_size: int, job: str, address: str, port: int
) -> dict[str, str]:
    """Return the environment variables of a rank, also those of torchrun."""
    numbers = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    return {
        **numbers,
        **{f"TAGI_DDP_{name}": value for name, value in numbers.items()},
        "TAGI_DDP_JOB": job,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


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

    def join(
        self,
        progress: int | None,
        blamed: Sequence[int],
        patience: float,
        done: bool,
        admits: bool,
    ) -> Assignment | None:
        """Join the next group; return the assignment in it, or None if all ranks are done.

        The arguments are those of `roll_call.JoinRequest`. Raise ConnectionError if the launcher is
        gone, TimeoutError if it does not answer.
        """
        request = {
            "progress": progress,
            "blamed": list(blamed),
            "patience": patience,
            "done": done,
            "admits": admits,
        }
        self._connection.send(json.dumps({"come": request}).encode())
        deadline = time.monotonic() + patience + _SLACK
        while self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = self._receive()
            if "seat" in message:
                self._call = None
                return Assignment.of(message["seat"])
            if "over" in message:
                return None
        raise TimeoutError(f"the launcher did not answer within {patience + _SLACK:g} s")

    def outlive(self, value: bool) -> None:
        """Set whether this rank goes on when another rank with this setting is lost."""
        with contextlib.suppress(OSError):  # This rank ends with the launcher.
            self._connection.send(json.dumps({"outlives": value}).encode())

    def _last_call(self) -> Call | None:
        """Return the launcher's last call since this rank joined its group."""
        while self._poll.poll(0):
            message = self._receive()
            if "call" in message:
                self._call = Call(**message["call"])
        return self._call

    def _receive(self) -> dict[str, Any]:
        data = self._connection.recv(MOST_BYTES)
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
