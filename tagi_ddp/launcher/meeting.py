"""How a rank and the launcher of its elastic job talk: what either says, and the rank's side.

By a socket that the rank has from its launcher and nobody else, so its end is the rank's. Each
message is JSON, in a packet of its own.
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

MOST_BYTES = 1 << 16  # of a message
_SLACK = 30.0  # seconds that the launcher may take to leave out those who did not come in time


@dataclass(frozen=True)
class Seat:
    """A rank's place in its next group.

    number: of the group. source: the rank whose state is the latest; behind: those that take it.
    stayed: how many ranks, the first ones, were in the group before. address, port: where rank 0
    can listen, as all ranks reach it.
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
    def of(cls, told: dict[str, Any]) -> Seat:
        """Return what `message` has told."""
        return cls(**{**told, "behind": tuple(told["behind"])})

    def enter(self, job: str) -> None:
        """Let this process's environment tell the place, as rank of a group of ``job``."""
        place = (self.rank, self.size, self.local_rank, self.local_size)
        name = f"{job}/{self.number}"  # no group hears what is left of another
        os.environ.update(variables(*place, name, self.address, self.port))

    def message(self) -> str:
        """Return what tells a rank of it."""
        return json.dumps({"seat": asdict(self)})


def variables(
    rank: int, size: int, local_rank: int, local_size: int, job: str, address: str, port: int
) -> dict[str, str]:
    """Return the variables that tell a rank its place, as torchrun sets them, too."""
    place = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
    }
    return {
        **place,
        **{f"TAGI_DDP_{name}": value for name, value in place.items()},
        "TAGI_DDP_JOB": job,
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


class Meeting:
    """This rank's side of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._call: Call | None = None

    def called(self, progress: int, exchanging: bool) -> bool:
        """Return whether this rank should come at once; it has taken ``progress`` updates.

        That is where it would exchange with ranks that do not, or if one waits that has taken less.
        """
        call = self._last_call()
        if call is None or call.joins:
            return False
        return exchanging or (call.progress is not None and call.progress < progress)

    @property
    def awaited(self) -> bool:
        """True if ranks wait to join, and nothing else has happened."""
        call = self._last_call()
        return call is not None and call.joins

    def come(
        self,
        progress: int | None,
        blamed: Sequence[int],
        patience: float,
        done: bool,
        admits: bool,
    ) -> Seat | None:
        """Return the place in the next group, once that is known; None: all have been done.

        The arguments are those of `roll_call.Coming`. Raises ConnectionError where the launcher is
        gone, TimeoutError where it does not answer.
        """
        told = {
            "progress": progress,
            "blamed": list(blamed),
            "patience": patience,
            "done": done,
            "admits": admits,
        }
        self._connection.send(json.dumps({"come": told}).encode())
        deadline = time.monotonic() + patience + _SLACK
        while self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            message = self._receive()
            if "seat" in message:
                self._call = None
                return Seat.of(message["seat"])
            if "over" in message:
                return None
        raise TimeoutError(f"the launcher did not answer within {patience + _SLACK:g} s")

    def outlive(self, value: bool) -> None:
        """Ask the launcher to let this rank go on, or not, when another that has asked is lost."""
        with contextlib.suppress(OSError):  # it is gone, and then this rank is, too
            self._connection.send(json.dumps({"outlives": value}).encode())

    def _last_call(self) -> Call | None:
        """Return what the launcher has asked for last, since this rank became one of its group."""
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


_meeting: Meeting | None = None


def open_meeting(descriptor: int) -> None:
    """Take the socket of this process's launcher, before anything else runs."""
    global _meeting
    connection = socket.socket(fileno=descriptor)
    _meeting = Meeting(connection)
    # The kernel closes it, as its end means the rank's; without this Python warns at exit.
    atexit.register(connection.detach)


def meeting() -> Meeting | None:
    """Return how this process meets the other ranks of its job; None: it has no such launcher."""
    return _meeting
