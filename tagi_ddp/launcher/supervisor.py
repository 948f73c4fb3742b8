"""Starts the ranks of one host, forwards what they print, and ends all when one of them fails."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO

from tagi_ddp.launcher.failure import Failure, LaunchError
from tagi_ddp.launcher.nodes import Nodes, Place, new_job
from tagi_ddp.launcher.rank_output import RankStream, Screen
from tagi_ddp.launcher.rank_process import Report

# Seconds: between looks at the ranks; to let the cause of a lost peer come to light; between
# SIGTERM and SIGKILL; for the kernel to carry out SIGKILL; to read what is left in the pipes.
_TICK = 0.05
_SETTLE = 4.0
_GRACE = 3.0
_KILL = 5.0
_DRAIN = 1.0


def supervise(
    command: Sequence[str],
    nprocs: int,
    timeout: float | None = None,
    *,
    pass_fds: Sequence[int] = (),
    nodes: Nodes | None = None,
) -> list[bytes | None]:
    """Run ``command`` (see `rank_process.main`) on ``nprocs`` ranks until all are done.

    With ``nodes`` they are a part of a job, which other hosts' ranks end as well. Returns the
    ranks' pickled results, for a script None. Raises LaunchError for the first rank that failed,
    TimeoutError after ``timeout`` seconds. When it returns or raises, whatever the ranks started is
    gone too, and what they printed has been written.
    """
    team = _Team(nodes)
    try:
        team.start(command, nprocs, pass_fds)
        failure = team.watch(timeout, needs_result=command[0] == "call")
    finally:
        team.end()
    if failure is not None:
        raise LaunchError(
            f"rank {failure.rank} of {team.world_size} {failure.text}",
            failure.rank,
            failure.exitcode,
            failure.traceback,
        )
    return [rank.report.get("result") for rank in team.ranks]


class _Rank:
    """One process and what it has reported."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self.report: Report = {}
        self.exitcode: int | None = None
        self.failure: Failure | None = None
        self._received = bytearray()

    def receive(self, data: bytes) -> None:
        """Take a piece of the report; b"" is its end."""
        self._received += data
        if data or not self._received:
            return
        try:
            self.report = pickle.loads(self._received)
        except (pickle.UnpicklingError, EOFError):  # killed while it wrote
            return
        self._received.clear()
        if "time" not in self.report:
            return
        status, text = self.report.get("status", 1), self.report.get("traceback", "")
        self.failure = Failure(
            self.number,
            f"failed:\n\n{text}" if text else f"ended with exit status {status}",
            status,
            self.report["time"],
            self.report["consequence"],
            text,
        )

    @property
    def leaving(self) -> bool:
        """Whether the process ends by itself, and may still have something to write."""
        return "status" in self.report and self.exitcode is None

    def poll(self) -> None:
        """Notice the end of the process, without reaping it: its pid names its group until then."""
        if self.exitcode is not None:
            return
        info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            exited = info.si_code == os.CLD_EXITED
            self.exitcode = info.si_status if exited else -info.si_status

    def judge(self, needs_result: bool) -> None:
        """Decide whether a process that has ended has failed."""
        if self.failure is not None or self.exitcode is None:
            return
        self.receive(b"")  # a process that it forked may hold the pipe open
        if self.exitcode < 0:
            text = f"was killed by {_signal_name(-self.exitcode)}"
        elif self.exitcode > 0:
            text = f"ended with exit status {self.exitcode}"
        elif needs_result and "result" not in self.report:
            text = "ended with exit status 0 before the function returned"
        else:
            return
        if self.failure is None:
            self.failure = Failure(self.number, text, self.exitcode, time.monotonic())

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


class _Team:
    """All ranks and their pipes."""

    def __init__(self, nodes: Nodes | None) -> None:
        self.ranks: list[_Rank] = []
        self.world_size = 0
        self._nodes = nodes
        self._port = reserve_port("127.0.0.1" if nodes is None else "")
        self._screen = Screen()
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, IO[bytes]] = {}  # that may still hold something, by descriptor

    def start(self, command: Sequence[str], nprocs: int, pass_fds: Sequence[int]) -> None:
        """Start all ranks; none goes on when this is interrupted."""
        port = self._port.getsockname()[1]
        if self._nodes is None:
            place = Place(0, nprocs, new_job(), secrets.token_hex(32), "127.0.0.1", port)
        else:
            place = self._nodes.join(nprocs, port)
        self.world_size = place.world_size
        gate, opener = os.pipe()
        try:
            for local in range(nprocs):
                environment = _environment(local, nprocs, place)
                self._start_rank(place.first + local, command, gate, pass_fds, environment)
            os.write(opener, bytes(nprocs))
        finally:
            os.close(gate)
            os.close(opener)

    def _start_rank(
        self,
        number: int,
        command: Sequence[str],
        gate: int,
        pass_fds: Sequence[int],
        environment: dict[str, str],
    ) -> None:
        # The rank finds this package where this process found it.
        code = (
            f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
            "from tagi_ddp.launcher.rank_process import main; main()"
        )
        reader, writer = os.pipe()
        report = open(reader, "rb", buffering=0)  # noqa: SIM115  (closed with the pipes)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(os.getpid()), str(gate), str(writer), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[gate, writer, *pass_fds],
                env=environment,
                start_new_session=True,  # a group to signal, and no Ctrl-C of the terminal
            )
        finally:
            os.close(writer)
        rank = _Rank(number, process)
        self.ranks.append(rank)
        self._read_from(report, rank.receive)
        for pipe, file in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert pipe is not None
            self._read_from(pipe, RankStream(self._screen, number, file).feed)

    def watch(self, timeout: float | None, needs_result: bool) -> Failure | None:
        """Wait until all ranks have ended well (None) or it is known which one failed first."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        settled = math.inf
        while True:
            self._pump(_TICK)
            for rank in self.ranks:
                rank.poll()
            running = [rank.number for rank in self.ranks if rank.exitcode is None]
            self._pump(0)  # the last words of ranks that have ended are in the pipes
            for rank in self.ranks:
                rank.judge(needs_result)
            now = time.monotonic()
            failures = [rank.failure for rank in self.ranks if rank.failure is not None]
            leaving = [rank.number for rank in self.ranks if rank.leaving]
            more = False  # whether other hosts' ranks run
            if self._nodes is not None:
                told = [failure for failure in failures if failure.rank not in leaving]
                self._nodes.exchange(told, done=not running and not failures)
                if self._nodes.over:
                    return self._nodes.verdict
                failures += self._nodes.failures
                more = self._nodes.running
            if self._nodes is None or self._nodes.decides:
                if failures:
                    first = min(failures, key=Failure.order)
                    settled = min(settled, now + _SETTLE)
                    known = not first.consequence and first.rank not in leaving
                    if known or not (running or more) or now >= settled:
                        return self._end_job(first)
                elif not (running or more):
                    return self._end_job(None)
            if now >= deadline:
                raise TimeoutError(
                    f"ranks {running} of {self.world_size} were still running after {timeout:g} "
                    "seconds; all were ended"
                )

    def _end_job(self, verdict: Failure | None) -> Failure | None:
        if self._nodes is not None:
            self._nodes.end(verdict)
        return verdict

    def end(self) -> None:
        """End every process that is left, write what they still said, and free everything."""
        try:
            for rank in self.ranks:
                rank.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + _GRACE
            while any(rank.exitcode is None for rank in self.ranks) and time.monotonic() < deadline:
                self._pump(_TICK)
                for rank in self.ranks:
                    rank.poll()
        finally:  # also when a second Ctrl-C cuts the grace short
            for rank in self.ranks:
                rank.send_signal(signal.SIGKILL)
            for rank in self.ranks:
                rank.process.wait(_KILL)
            self._close_pipes()

    def _close_pipes(self) -> None:
        deadline = time.monotonic() + _DRAIN
        try:
            while self._selector.get_map() and time.monotonic() < deadline:
                self._pump(_TICK)
            self._screen.end_bar()
        finally:
            for pipe in self._pipes.values():
                pipe.close()
            self._selector.close()
            self._port.close()
            if self._nodes is not None:
                self._nodes.close()

    def _pump(self, seconds: float) -> None:
        """Wait up to ``seconds`` for output or reports; pass on a piece of each."""
        for key, _ in self._selector.select(seconds):
            data = os.read(key.fd, 1 << 16)  # as much as a pipe holds
            key.data(data)
            if not data:
                self._selector.unregister(key.fd)
                self._pipes.pop(key.fd).close()

    def _read_from(self, pipe: IO[bytes], take: Callable[[bytes], None]) -> None:
        self._pipes[pipe.fileno()] = pipe
        self._selector.register(pipe.fileno(), selectors.EVENT_READ, take)


def _environment(local: int, nprocs: int, job: Place) -> dict[str, str]:
    """Return this process's environment with the rank's place in it, as torchrun sets it too."""
    # torch would ask the agent of an outer torchrun for the address of rank 0.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    place = {
        "RANK": str(job.first + local),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(nprocs),
    }
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // nprocs)),
        **inherited,
        **place,
        **{f"TAGI_DDP_{name}": value for name, value in place.items()},
        "TAGI_DDP_JOB": job.job,
        "TAGI_DDP_SECRET": job.secret,
        "MASTER_ADDR": job.address,
        "MASTER_PORT": str(job.port),
    }


def reserve_port(address: str = "127.0.0.1") -> socket.socket:
    """Return a socket at a TCP port of ``address`` that nobody else is given while it is open.

    It does not listen, and others may reuse its address: so a store can listen there.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # the real-time signals have no names
        return f"signal {number}"
