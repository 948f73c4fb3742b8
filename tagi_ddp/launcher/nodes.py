"""The launchers of a job's hosts: where their ranks stand, and that all end when one fails.

Node 0's launcher listens; each of the others connects to it, and proves that it has the job's
secret. They tell it of their ranks' failures and ends, and it tells them when the job is over. A
lost connection is a lost host. What the ranks of an elastic job say goes on to node 0, and what it
tells them comes back.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.control import mesh
from tagi_ddp.environment import job_secret
from tagi_ddp.launcher.elastic import number_of
from tagi_ddp.launcher.failure import Failure

_MEET = DEFAULT_TIMEOUT  # seconds in which all launchers must come
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAME = "tagi-ddp run"  # what they ask for at the port where they meet


@dataclass(frozen=True)
class Place:
    """Where the ranks of this host stand in their job, and where rank 0 listens."""

    first: int
    world_size: int
    job: str
    secret: str
    address: str
    port: int


class Nodes:
    """Node ``node_rank`` of ``count``; node 0 listens at its ``rendezvous``, host and port.

    ``job`` is the name of the job that this launcher was in before, and starts again; "": none.
    """

    def __init__(
        self, count: int, node_rank: int, rendezvous: tuple[str, int], job: str = ""
    ) -> None:
        """Prepare; `join` meets the others.

        Raises ValueError if there is no job secret: whoever reached the port could join the job.
        """
        self._secret = job_secret()
        if not self._secret:
            raise ValueError(
                "a job on several nodes needs a secret: set TAGI_DDP_SECRET to the same random "
                "text on all of them, or TAGI_DDP_SECRET_FILE to the name of a file with it"
            )
        self._count = count
        self._node_rank = node_rank
        self._address, self._port = rendezvous
        self.job = job
        """The name of the job that this launcher is in, or was in before; "": of none."""
        self._others: dict[int, Connection] = {}  # of node 0 all, of any other node 0
        self._firsts = [0] * count  # the first rank of each node
        self._running: set[int] = set()
        self._told: set[tuple[int, float]] = set()  # failures that node 0 has been told of
        self._ended: set[str] = set()  # ranks of this host
        self._counts = [0] * count  # how many ranks each has
        self._ends: dict[int, tuple[str, int]] = {}  # where a node's rank could listen
        self.failures: list[Failure] = []
        """What node 0 has heard of the other nodes' ranks."""
        self._said: list[tuple[str, dict[str, Any] | None]] = []
        self._passed: list[tuple[str, str]] = []
        self._survived: list[int] = []
        self.lost: list[int] = []
        """The numbers of ranks whose host is lost."""
        self.over = False
        """Whether node 0 has said that the job is over, because of `verdict`."""
        self.verdict: Failure | None = None

    @property
    def decides(self) -> bool:
        """Whether this is node 0, which says when the job is over."""
        return self._node_rank == 0

    @property
    def running(self) -> bool:
        """Whether, as far as node 0 knows, another node's ranks run."""
        return bool(self._running)

    def join(self, nprocs: int, port: int) -> Place:
        """Return the place of this host's ``nprocs`` ranks; on node 0, rank 0 can use ``port``.

        Raises TimeoutError that names the nodes that did not come, OSError if node 0 cannot listen,
        or if it leads another job than the one that this launcher was in.
        """
        deadline = time.monotonic() + _MEET
        if self.decides:
            others = list(range(1, self._count))
            found = self._admit(others, deadline)
            if missing := [node for node in others if node not in found]:
                raise self._absent(missing)
            guests = [found[node] for node in others]
            counts = [nprocs, *(guest["ranks"] for guest in guests)]
            # Kubernetes may call this host localhost, where other hosts would not find rank 0.
            names = [self._address, *(guest["address"] for guest in guests)]
            self._address = next((name for name in names if name not in _LOOPBACK), names[0])
            self._counts = counts
            self._firsts = [sum(counts[:node]) for node in range(self._count)]
            self._ends = {0: (self._address, port)}
            for node, guest in zip(others, guests, strict=True):
                with socket.socket(fileno=os.dup(self._others[node].fileno())) as end:
                    host = end.getpeername()[0].removeprefix("::ffff:")  # IPv4 by a socket of both
                self._ends[node] = host, guest["port"]
            place = Place(0, sum(counts), new_job(), "", "", port)
            for node in others:
                self._send(node, {"place": asdict(replace(place, first=self._firsts[node]))})
            self._running = set(others)
        else:
            self._call(deadline)
            hello = {"ranks": nprocs, "address": self._address, "port": port, "job": self.job}
            self._send(0, hello)
            wait([self._others[0]], deadline - time.monotonic())
            answer = self._receive(0)
            if "other job" in answer:
                raise ConnectionRefusedError(
                    f"node 0 at {self._address}, port {self._port}, leads another job than the one "
                    "that this host was in. Start tagi-ddp run here anew to be a node of it"
                )
            if "place" not in answer:
                raise TimeoutError("node 0 has given up: its tagi-ddp run says why")
            place = Place(**answer["place"])
            self._running = {self._node_rank}
        self.job = place.job
        # The secret itself does not travel; hosts may know node 0 by different names.
        secret = hmac.digest(self._secret, place.job.encode(), "sha256").hex()
        return replace(place, secret=secret, address=self._address)

    def _absent(self, nodes: list[int]) -> TimeoutError:
        return TimeoutError(
            f"nodes {nodes} of {self._count} did not come to {self._address}, port {self._port}, "
            f"within {_MEET:g} seconds: give tagi-ddp run on all nodes the same --nnodes and "
            "--rendezvous, and the same secret"
        )

    def _admit(self, others: list[int], deadline: float) -> dict[int, dict[str, Any]]:
        """Connect, as node 0, to the others; return the first message of each.

        A launcher that was in another job before, and waits to start that again, is refused.
        """
        try:
            listener = mesh.Listener(self._secret, port=self._port, nonce=_NAME)
        except OSError as error:
            where = f"node 0 cannot listen at port {self._port}"
            raise OSError(error.errno, f"{where}: {error.strerror}") from error
        found: dict[int, dict[str, Any]] = {}
        with closing(listener):
            while len(found) < len(others) and time.monotonic() < deadline:
                missing = {node for node in others if node not in found}
                for node, connection in listener.accept(missing, deadline).items():
                    hello = _hello_of(connection)
                    if hello.get("ranks") and hello.get("job", "") in ("", self.job):
                        self._others[node], found[node] = connection, hello
                    else:
                        with suppress(OSError), connection:
                            connection.send_bytes(json.dumps({"other job": True}).encode())
        return found

    def _call(self, deadline: float) -> None:
        """Connect to node 0."""
        record = mesh.Record(host="", addresses=[self._address], port=self._port, nonce=_NAME)
        connection = mesh.call(self._node_rank, record, self._secret, deadline)
        if connection is None:
            raise self._absent([0])
        self._others[0] = connection

    def end_of(self, rank: int) -> tuple[int, str, int]:
        """Return, as node 0, a rank's node, and where a rank could listen there."""
        node = self.node_of(rank)
        return node, *self._ends[node]

    def node_of(self, rank: int) -> int:
        """Return, as node 0, where a rank is."""
        return bisect_right(self._firsts, rank) - 1

    def say(self, name: str, message: dict[str, Any] | None) -> None:
        """Pass on to node 0 what a rank has said; None: it has ended."""
        self._send(0, {"says": [name, message]})

    def tell(self, name: str, text: str) -> None:
        """Pass on to a rank, as node 0, what it is told."""
        self._send(self.node_of(number_of(name)), {"tell": [name, text]})

    def survive(self, outlives: Callable[[int], bool]) -> list[Failure]:
        """Let other nodes' ranks that the job outlives be lost, as node 0, and return how."""
        survived = [failure for failure in self.failures if outlives(failure.rank)]
        self.failures = [failure for failure in self.failures if failure not in survived]
        for failure in survived:
            self._send(self.node_of(failure.rank), {"survived": failure.rank})
        return survived

    def take_said(self) -> list[tuple[str, dict[str, Any] | None]]:
        """Return what node 0 has heard that ranks, by name, have said; None: they have ended."""
        said, self._said = self._said, []
        return said

    def take_told(self) -> list[tuple[str, str]]:
        """Return what this node has heard from node 0 for its ranks, by name."""
        told, self._passed = self._passed, []
        return told

    def take_survived(self) -> list[int]:
        """Return ranks of this node without which, node 0 says, the others go on."""
        survived, self._survived = self._survived, []
        return survived

    def exchange(self, failures: list[Failure], ended: list[str], done: bool) -> None:
        """Tell node 0 of this host's ``failures``, who has ended, if it is done; hear what is new.

        It hears of an end after the failure, so that it takes none for a success.
        """
        if not self.decides:
            for failure in failures:
                if (failure.rank, failure.time) not in self._told:
                    self._told.add((failure.rank, failure.time))
                    self._send(0, {"failure": asdict(failure)})
            for name in set(ended) - self._ended:
                self.say(name, None)
            self._ended.update(ended)
            if done and self._running:
                self._running = set()
                self._send(0, {})
        numbers = {connection: node for node, connection in self._others.items()}
        while not self.over and (there := wait(list(self._others.values()), 0)):
            for connection in there:
                assert isinstance(connection, Connection)
                self._take(numbers[connection], self._receive(numbers[connection]))

    def _take(self, node: int, message: dict[str, Any]) -> None:
        if "failure" in message:
            self.failures.append(Failure(**message["failure"] | {"time": time.monotonic()}))
        elif "verdict" in message:
            self.over = True
            if message["verdict"] is not None:
                self.verdict = Failure(**message["verdict"])
        elif "says" in message:
            self._said.append(tuple(message["says"]))
        elif "tell" in message:
            self._passed.append(tuple(message["tell"]))
        elif "survived" in message:
            self._survived.append(message["survived"])
        else:
            self._running.discard(node)

    def end(self, verdict: Failure | None) -> None:
        """Tell all, as node 0, that the job is over."""
        for node in list(self._others):
            self._send(node, {"verdict": verdict and asdict(verdict)})

    def close(self) -> None:
        """Leave the others, who take this host for lost unless the job is over."""
        for connection in self._others.values():
            connection.close()

    def _send(self, node: int, message: dict[str, Any]) -> None:
        with suppress(OSError, KeyError):  # what reads finds the end
            self._others[node].send_bytes(json.dumps(message).encode())

    def _receive(self, node: int) -> dict[str, Any]:
        """Return a message of ``node``, at its end that it is lost."""
        try:
            message: dict[str, Any] = json.loads(self._others[node].recv_bytes())
        except (OSError, EOFError):
            text = f"was lost with its host: the launcher of node {node} has gone"
            lost = asdict(Failure(self._firsts[node], text, 1, time.monotonic()))
            self._others.pop(node).close()
            self._running.discard(node)
            if self.decides:
                self.lost += range(self._firsts[node], self._firsts[node] + self._counts[node])
            return {"failure": lost} if self.decides else {"verdict": lost}
        return message


def _hello_of(connection: Connection) -> dict[str, Any]:
    """Return the first message of a node; an empty one if it is gone."""
    with suppress(OSError, EOFError):
        hello: dict[str, Any] = json.loads(connection.recv_bytes())
        return hello
    return {}


def new_job() -> str:
    """Return a name that no other job has."""
    return f"{os.getpid()}-{secrets.token_hex(8)}"
