"""Connections between the launchers of a job's hosts, which number the ranks and report failures.

Node 0's launcher listens. Each of the others connects to it and proves that it has the job's
secret. They report the failures and ends of their ranks, and node 0 announces the end of the job. A
lost connection is a lost host. Messages of an elastic job's ranks are forwarded to node 0, and its
answers back to the ranks.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from typing import Any

from tagi_ddp.communicators.communicator import DEFAULT_TIMEOUT
from tagi_ddp.communicators.control import mesh
from tagi_ddp.communicators.equality import EARLIER, package_version
from tagi_ddp.elastic.membership import number_of
from tagi_ddp.environment import job_secret
from tagi_ddp.launcher.failure import Failure
from tagi_ddp.launcher.host import HostAssignment, new_job

_CONNECT = DEFAULT_TIMEOUT  # seconds within which all launchers must connect
_REPORT = 30.0  # seconds between two lines about the nodes that are missing
_SLICE = 0.2  # seconds between two looks at the nodes that have called
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_NAME = "tagi-ddp run"  # the nonce of the listener and of the calls to it


class Nodes:
    """Node ``node_rank`` of ``count``; node 0 listens at its ``rendezvous``, host and port.

    ``job`` is the name of the job that this launcher restarts; "" if it starts its first.
    ``report`` takes a line about those for which this node waits.
    """

    def __init__(
        self,
        count: int,
        node_rank: int,
        rendezvous: tuple[str, int],
        job: str = "",
        report: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Read the job's secret; `join` connects to the others.

        Raise ValueError if there is none: anyone who reaches the port could join the job.
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
        self._report = report
        self.job = job
        """The name of this launcher's present job, or of its last one; "" if there is none."""
        self._others: dict[int, Connection] = {}  # all others on node 0; node 0 on the others
        self._firsts = [0] * count  # the first rank of each node
        self._running: set[int] = set()
        self._reported: set[tuple[int, float]] = set()  # failures that node 0 knows
        self._ended: set[str] = set()  # ended ranks of this host that node 0 knows
        self._counts = [0] * count  # the number of ranks of each node
        self._endpoints: dict[int, tuple[str, int]] = {}  # where a node's rank can listen
        self.failures: list[Failure] = []
        """The failures of other nodes' ranks, on node 0."""
        self.from_ranks: deque[tuple[str, dict[str, Any] | None]] = deque()
        """New (rank's name, message) on node 0; None: the rank has ended."""
        self.for_ranks: deque[tuple[str, str]] = deque()
        """New (rank's name, message) of node 0 for this node's ranks."""
        self.survived: list[int] = []
        """Failed ranks of this node without which the others go on, by node 0's decision."""
        self.lost: list[int] = []
        """The numbers of ranks whose host is lost."""
        self.over = False
        """True if node 0 has ended the job, because of `verdict`."""
        self.verdict: Failure | None = None

    @property
    def decides(self) -> bool:
        """True on node 0, which decides when the job is over."""
        return self._node_rank == 0

    @property
    def running(self) -> bool:
        """True if another node's ranks run, as far as node 0 knows."""
        return bool(self._running)

    def join(self, nprocs: int, port: int) -> HostAssignment:
        """Connect all nodes; return the numbers of this host's ``nprocs`` ranks.

        On node 0, rank 0 can listen at ``port``. Raise TimeoutError that names the nodes that did
        not connect, OSError if node 0 cannot listen or leads another job than this launcher's.
        """
        deadline = time.monotonic() + _CONNECT
        if self.decides:
            others = list(range(1, self._count))
            found = self._accept(others, deadline)
            if missing := [node for node in others if node not in found]:
                raise self._absent(missing)
            hellos = [found[node] for node in others]
            counts = [nprocs, *(hello["ranks"] for hello in hellos)]
            # Kubernetes may name this host localhost, at which other hosts do not find rank 0.
            names = [self._address, *(hello["address"] for hello in hellos)]
            self._address = next((name for name in names if name not in _LOOPBACK), names[0])
            self._counts = counts
            self._firsts = [sum(counts[:node]) for node in range(self._count)]
            self._endpoints = {0: (self._address, port)}
            for node, hello in zip(others, hellos, strict=True):
                with socket.socket(fileno=os.dup(self._others[node].fileno())) as end:
                    host = end.getpeername()[0].removeprefix("::ffff:")  # IPv4 on a socket of IPv6
                self._endpoints[node] = host, hello["port"]
            assignment = HostAssignment(0, sum(counts), new_job(), "", "", port)
            for node in others:
                self._send(
                    node, {"assignment": asdict(replace(assignment, first=self._firsts[node]))}
                )
            self._running = set(others)
        else:
            self._call(deadline)
            hello = {"ranks": nprocs, "address": self._address, "port": port, "job": self.job}
            self._send(0, {**hello, "version": package_version()})
            wait([self._others[0]], deadline - time.monotonic())
            answer = self._receive(0)
            if "other job" in answer:
                raise ConnectionRefusedError(
                    f"node 0 at {self._address}, port {self._port}, leads another job than the one "
                    "that this host was in. Start tagi-ddp run here anew to be a node of it"
                )
            if "refused" in answer:
                raise ConnectionRefusedError(answer["refused"])
            if "assignment" not in answer:
                raise TimeoutError("node 0 has given up: its tagi-ddp run says why")
            assignment = HostAssignment(**answer["assignment"])
            self._running = {self._node_rank}
        self.job = assignment.job
        # The secret itself is not sent. Each host keeps its own name of node 0.
        secret = hmac.digest(self._secret, assignment.job.encode(), "sha256").hex()
        return replace(assignment, secret=secret, address=self._address)

    def _absent(self, nodes: list[int]) -> TimeoutError:
        return TimeoutError(
            f"nodes {nodes} of {self._count} did not connect to {self._address}, port {self._port},"
            f" within {_CONNECT:g} seconds: give tagi-ddp run on all nodes the same --nnodes and "
            "--rendezvous, and the same secret"
        )

    def _accept(self, others: list[int], deadline: float) -> dict[int, dict[str, Any]]:
        """Accept the connections of the others on node 0; return the first message of each.

        A launcher that waits to restart another job is refused.
        """
        try:
            listener = mesh.Listener(self._secret, port=self._port, nonce=_NAME)
        except OSError as error:
            problem = f"node 0 cannot listen at port {self._port}"
            raise OSError(error.errno, f"{problem}: {error.strerror}") from error
        found: dict[int, dict[str, Any]] = {}
        told = time.monotonic()
        with closing(listener):
            while len(found) < len(others) and time.monotonic() < deadline:
                missing = {node for node in others if node not in found}
                soon = min(deadline, time.monotonic() + _SLICE)
                for node, connection in listener.accept(missing, soon).items():
                    hello = _hello_of(connection)
                    version = hello.get("version", EARLIER)
                    if hello and version != package_version():
                        raise self._other_version(node, version, connection)
                    if hello.get("ranks") and hello.get("job", "") in ("", self.job):
                        self._others[node], found[node] = connection, hello
                    else:
                        with suppress(OSError), connection:
                            connection.send_bytes(json.dumps({"other job": True}).encode())
                missing -= found.keys()
                if missing and time.monotonic() - told >= _REPORT:
                    told = time.monotonic()
                    names = ", ".join(map(str, sorted(missing)))
                    self._report(f"node 0 waits for nodes {names} at port {self._port}")
        return found

    def _other_version(self, node: int, version: str, connection: Connection) -> OSError:
        """Return the error of different versions; send its text to all nodes that have called."""
        error = ConnectionRefusedError(
            f"node {node} has tagi_ddp {version}, but node 0 has {package_version()}: install the "
            "same version on all nodes"
        )
        for other in [connection, *self._others.values()]:
            with suppress(OSError):
                other.send_bytes(json.dumps({"refused": str(error)}).encode())
        connection.close()
        return error

    def _call(self, deadline: float) -> None:
        """Connect to node 0."""
        record = mesh.Record(host="", addresses=[self._address], port=self._port, nonce=_NAME)
        connection = None
        while connection is None and time.monotonic() < deadline:
            soon = min(deadline, time.monotonic() + _REPORT)
            connection = mesh.call(self._node_rank, record, self._secret, soon)
            if connection is None:
                at = f"{self._address}, port {self._port}"
                self._report(f"node {self._node_rank} waits for node 0 at {at}")
        if connection is None:
            raise self._absent([0])
        self._others[0] = connection

    def endpoint_of(self, rank: int) -> tuple[int, str, int]:
        """Return a rank's node, and the address and port of a rank there, on node 0."""
        node = self.node_of(rank)
        return node, *self._endpoints[node]

    def node_of(self, rank: int) -> int:
        """Return the node of a rank, on node 0."""
        return bisect_right(self._firsts, rank) - 1

    def forward_from_rank(self, name: str, message: dict[str, Any] | None) -> None:
        """Send a rank's message to node 0; None: the rank has ended."""
        self._send(0, {"from_rank": [name, message]})

    def forward_to_rank(self, name: str, text: str) -> None:
        """Send a message to a rank's node, on node 0."""
        self._send(self.node_of(number_of(name)), {"for_rank": [name, text]})

    def survive(self, outlives: Callable[[int], bool]) -> list[Failure]:
        """Drop and return the failures that the job outlives, on node 0; inform their nodes."""
        survived = [failure for failure in self.failures if outlives(failure.rank)]
        self.failures = [failure for failure in self.failures if failure not in survived]
        for failure in survived:
            self._send(self.node_of(failure.rank), {"survived": failure.rank})
        return survived

    def exchange(self, failures: list[Failure], ended: list[str], done: bool) -> None:
        """Send this host's ``failures``, ``ended`` ranks and ``done`` to node 0; receive messages.

        A failure is sent before the rank's end, which node 0 would else count as a success.
        """
        if not self.decides:
            for failure in failures:
                if (failure.rank, failure.time) not in self._reported:
                    self._reported.add((failure.rank, failure.time))
                    self._send(0, {"failure": asdict(failure)})
            for name in set(ended) - self._ended:
                self.forward_from_rank(name, None)
            self._ended.update(ended)
            if done and self._running:
                self._running = set()
                self._send(0, {})
        numbers = {connection: node for node, connection in self._others.items()}
        while not self.over and (ready := wait(list(self._others.values()), 0)):
            for connection in ready:
                assert isinstance(connection, Connection)
                self._handle(numbers[connection], self._receive(numbers[connection]))

    def _handle(self, node: int, message: dict[str, Any]) -> None:
        if "failure" in message:
            self.failures.append(Failure(**message["failure"] | {"time": time.monotonic()}))
        elif "verdict" in message:
            self.over = True
            if message["verdict"] is not None:
                self.verdict = Failure(**message["verdict"])
        elif "from_rank" in message:
            self.from_ranks.append(tuple(message["from_rank"]))
        elif "for_rank" in message:
            self.for_ranks.append(tuple(message["for_rank"]))
        elif "survived" in message:
            self.survived.append(message["survived"])
        else:
            self._running.discard(node)

    def end(self, verdict: Failure | None) -> None:
        """Send the end of the job to all nodes, on node 0."""
        for node in list(self._others):
            self._send(node, {"verdict": verdict and asdict(verdict)})

    def close(self) -> None:
        """Close all connections; the others count this host as lost unless the job is over."""
        for connection in self._others.values():
            connection.close()

    def _send(self, node: int, message: dict[str, Any]) -> None:
        with suppress(OSError, KeyError):  # The next receive finds the end.
            self._others[node].send_bytes(json.dumps(message).encode())

    def _receive(self, node: int) -> dict[str, Any]:
        """Return a message of ``node``; at the end of its connection, one that it is lost."""
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
    """Return the first message of a node; {} if the node is gone."""
    with suppress(OSError, EOFError):
        hello: dict[str, Any] = json.loads(connection.recv_bytes())
        return hello
    return {}
