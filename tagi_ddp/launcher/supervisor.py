"""Supervisor of a host's ranks: forwards their output and ends all of them if one fails."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import IO

from tagi_ddp.elastic.membership import ElasticPolicy, name_of, number_of
from tagi_ddp.elastic.messages import PREEMPTED
from tagi_ddp.launcher.failure import Failure, LaunchError
from tagi_ddp.launcher.host import HostAssignment, new_job, reserve_port
from tagi_ddp.launcher.nodes import Nodes
from tagi_ddp.launcher.rank_output import RankOutputs
from tagi_ddp.launcher.restarts import Restarts
from tagi_ddp.launcher.started_rank import Start, StartedRank

_TICK = 0.05  # seconds between two checks of the ranks
_CAUSE = 4.0  # seconds to wait for the cause of a lost peer
_GRACE = 3.0  # seconds between SIGTERM and SIGKILL for ranks that save no checkpoint
_KILL = 5.0  # seconds for the kernel to carry out SIGKILL
_DRAIN = 1.0  # seconds to read the remaining output


def supervise(
    command: Sequence[str],
    nprocs: int,
    timeout: float | None = None,
    *,
    pass_fds: Sequence[int] = (),
    nodes: Nodes | None = None,
    restarts: Restarts | None = None,
    signals: list[int] | None = None,
    outputs: RankOutputs | None = None,
    grace: float | None = None,
) -> list[bytes | None]:
    """Run ``command`` (see `rank_process.main`) on ``nprocs`` ranks until all have ended.

    With ``nodes`` they are a part of a job, which a failure on any host ends. Return the ranks'
    pickled results, or None for each rank of a script. Raise LaunchError for the first rank that
    failed, TimeoutError after ``timeout`` seconds, OSError if the ranks' output cannot be written.
    In all cases the ranks have then ended, with all processes that they started. A signal handler
    may append to ``signals``: those are sent to the process of each rank. It may raise SystemExit:
    ranks then have ``grace`` seconds, by default those that they ask for to save a checkpoint, and
    if all have saved one, its code is `PREEMPTED`.

    ``outputs`` takes what the ranks print; by default this process's streams. A job is elastic if
    its ranks join a group (`elastic.rendezvous`): the others go on when a rank is lost, and a new
    rank replaces it while ``restarts`` are left. A failure that ends the job is counted there, too.
    """
    signals = [] if signals is None else signals
    restarts, outputs, began = restarts or Restarts(0), outputs or RankOutputs(), time.monotonic()
    team = _Team(nodes, restarts, signals, outputs)
    ended: SystemExit | None = None  # by a signal
    try:
        team.start(command, nprocs, pass_fds)
        failure = team.watch(timeout, needs_result=command[0] == "call")
    except SystemExit as error:
        ended = error
        raise
    finally:
        # A second Ctrl-C, during any of these calls, only shortens the ranks' grace period.
        try:
            team.terminate(ended is not None, grace)
            if ended is not None and team.is_preempted():
                ended.code = PREEMPTED
        finally:
            try:
                team.kill()
            finally:
                team.kill()
                team.close()
    if failure is not None:
        restarts.count(failure, began)
        raise LaunchError(
            f"rank {failure.rank} of {team.world_size} {failure.text}",
            failure.rank,
            failure.exitcode,
            failure.traceback,
        )
    outputs.check()
    return [rank.report.get("result") for rank in sorted(team.ranks, key=lambda r: r.number)]


class _Team:
    """All ranks of this host and their pipes."""

    def __init__(
        self, nodes: Nodes | None, restarts: Restarts, signals: list[int], outputs: RankOutputs
    ) -> None:
        self.ranks: list[StartedRank] = []
        self.world_size = 0
        self._nodes = nodes
        self._restarts = restarts
        self._signals = signals  # those to forward to the ranks
        self._losses: list[Failure] = []  # the failures that the job has survived
        self._attempts: Counter[int] = Counter()
        self._job: ElasticPolicy | None = None  # of all hosts' ranks, on node 0 only
        self._port = reserve_port(one_host=nodes is None)
        self._outputs = outputs
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, IO[bytes] | socket.socket] = {}  # by descriptor

    def start(self, command: Sequence[str], nprocs: int, pass_fds: Sequence[int]) -> None:
        """Start all ranks; if this is interrupted, none of them runs the command."""
        address, port = self._port.getsockname()[:2]
        if self._nodes is None:
            host = HostAssignment(0, nprocs, new_job(), secrets.token_hex(32), address, port)
        else:
            host = self._nodes.join(nprocs, port)
        self.world_size = host.world_size
        starts = [
            Start(host.first + local, command, host.environment(local, nprocs), pass_fds)
            for local in range(nprocs)
        ]
        self._start_ranks(starts)
        if self._nodes is None or self._nodes.decides:
            names = [name_of(number, 1) for number in range(self.world_size)]
            self._job = ElasticPolicy(names, self._send, partial(self._endpoint_of, host))

    def _endpoint_of(self, host: HostAssignment, name: str) -> tuple[int, str, int]:
        if self._nodes is not None:
            return self._nodes.endpoint_of(number_of(name))
        return 0, host.address, host.port

    def _start_ranks(self, starts: Sequence[Start]) -> None:
        gate, opener = os.pipe()
        try:
            for start in starts:
                self._start_rank(start, gate)
            os.write(opener, bytes(len(starts)))
        finally:
            os.close(gate)
            os.close(opener)

    def _start_rank(self, start: Start, gate: int) -> None:
        self._attempts[start.number] += 1
        rank = StartedRank(start, self._attempts[start.number], gate)
        self.ranks.append(rank)
        self._read_from(rank.reports, rank.receive)
        self._read_from(rank.connection, partial(self._receive, rank))
        pipes = rank.process.stdout, rank.process.stderr
        for pipe, take in zip(pipes, self._outputs.of(rank.number), strict=True):
            assert pipe is not None
            self._read_from(pipe, take)

    # --- elastic jobs -------------------------------------------------------------------------

    def _receive(self, rank: StartedRank, data: bytes) -> None:
        message = json.loads(data) if data else None
        if message is not None and "outlives" in message:
            rank.outlives = message["outlives"]
        elif message is not None and "grace" in message:
            rank.grace = message["grace"]
        elif self._job is not None:
            self._job.receive(rank.name, message, time.monotonic())
        elif self._nodes is not None and message is not None:
            self._nodes.forward_from_rank(rank.name, message)

    def _send(self, name: str, message: str) -> None:
        for rank in self.ranks:
            if rank.name == name:
                with contextlib.suppress(OSError):  # The rank may have ended.
                    rank.connection.send(message.encode())
                return
        if self._nodes is not None and self._nodes.decides:
            self._nodes.forward_to_rank(name, message)

    def _update_group(self, job: ElasticPolicy, now: float) -> None:
        """Update the group of an elastic job: drop the ranks that are lost, and admit new ones."""
        for rank in self.ranks:
            if rank.exitcode is not None:
                job.remove(rank.name)
        if self._nodes is not None:
            while self._nodes.from_ranks:
                name, message = self._nodes.from_ranks.popleft()
                job.receive(name, message, now)
            job.remove_numbers(self._nodes.lost)
        if job.update(now):
            self._losses.clear()
        self._survive([rank.number for rank in self.ranks if job.outlives(rank.number)])
        if self._nodes is not None:
            for failure in self._nodes.survive(job.outlives):
                self._losses.append(failure)
                if failure.rank in self._nodes.lost:  # Its launcher cannot print it.
                    self._outputs.print(f"rank {failure.rank} {failure.text}; the others go on")

    def _fatal(self, job: ElasticPolicy) -> list[Failure]:
        """Return the failures that end the job, with those that it has survived so far."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        if self._nodes is not None:
            failures += self._nodes.failures
        failures = [failure for failure in failures if not job.outlives(failure.rank)]
        return failures + self._losses if failures or job.lost else []

    def _survive(self, numbers: Collection[int]) -> None:
        """Go on without those of these ranks that have failed and ended."""
        for rank in [each for each in self.ranks if each.number in numbers]:
            if rank.exitcode is not None and rank.failure is not None:
                self._go_on_without(rank, rank.failure)

    def _go_on_without(self, rank: StartedRank, failure: Failure) -> None:
        rank.send_signal(signal.SIGKILL)  # for the processes that it started
        rank.process.wait(_KILL)
        self.ranks.remove(rank)
        self._losses.append(failure)
        what = "failed" if failure.traceback else failure.text
        then = "the others go on"
        self._restarts.count(failure, rank.started)
        if self._restarts.again:
            self._start_ranks([rank.start])
            then += ", and a new one starts"
        elif reason := self._restarts.reason:
            then += f"; {reason}"
        self._outputs.print(f"rank {rank.number} {what}; {then}")

    def watch(self, timeout: float | None, needs_result: bool) -> Failure | None:
        """Wait for the ranks; return the first failure, or None once all have ended without one."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        cause_deadline = math.inf
        while True:
            self._read_pipes(_TICK)
            self._outputs.check()
            while self._signals:
                number = self._signals.pop(0)
                for rank in self.ranks:
                    rank.forward_signal(number)
            for rank in self.ranks:
                rank.poll()
            running = [rank.number for rank in self.ranks if self._awaits(rank)]
            self._read_pipes(0)  # Read the last output of ranks that have ended.
            for rank in self.ranks:
                rank.check_exit(needs_result)
            now = time.monotonic()
            failures = [rank.failure for rank in self.ranks if rank.failure is not None]
            leaving = [rank.number for rank in self.ranks if rank.leaving]
            others_run = False  # True if other hosts' ranks run.
            if self._nodes is not None:
                final = [failure for failure in failures if failure.rank not in leaving]
                ended = [rank.name for rank in self.ranks if rank.exitcode is not None]
                self._nodes.exchange(final, ended, done=not running and not failures)
                if self._nodes.over:
                    return self._nodes.verdict
                while self._nodes.for_ranks:
                    self._send(*self._nodes.for_ranks.popleft())
                self._survive(self._nodes.survived)
                self._nodes.survived.clear()
                others_run = self._nodes.running
            if self._job is not None:
                self._update_group(self._job, now)
                failures = self._fatal(self._job)
                others_run = others_run and not self._job.ended
                if failures:
                    first = min(failures, key=Failure.order)
                    cause_deadline = min(cause_deadline, now + _CAUSE)
                    known = not first.consequence and first.rank not in leaving
                    over = known or not (running or others_run) or now >= cause_deadline
                    if over and not self._goes_on():
                        return self._end_job(first)
                elif not (running or others_run):
                    return self._end_job(None)
            if timeout is not None and now >= deadline:
                raise TimeoutError(
                    f"ranks {running} of {self.world_size} were still running after "
                    f"{round(timeout, 2):g} seconds; all were ended"
                )

    def _goes_on(self) -> bool:
        """Return whether a job of one host goes on without the ranks that have failed."""
        failed = [rank.outlives for rank in self.ranks if rank.failure is not None]
        left = [rank.outlives for rank in self.ranks if rank.failure is None and self._awaits(rank)]
        return self._nodes is None and all(failed) and any(left)

    def _awaits(self, rank: StartedRank) -> bool:
        """Return whether the job waits for the rank's end: not for one outside an elastic group."""
        return rank.exitcode is None and (self._job is None or self._job.awaits(rank.name))

    def _end_job(self, verdict: Failure | None) -> Failure | None:
        if self._nodes is not None:
            self._nodes.end(verdict)
        return verdict

    def is_preempted(self) -> bool:
        """Return whether all ranks have saved a checkpoint after a signal."""
        return bool(self.ranks) and all(rank.exitcode == PREEMPTED for rank in self.ranks)

    def terminate(self, announced: bool, grace: float | None) -> None:
        """Send SIGTERM to every remaining process, and wait a few seconds for the ranks.

        If a signal has ``announced`` the end, wait ``grace`` seconds, or as long as the ranks that
        save a checkpoint have asked for. These may need the processes that they have started, which
        then end with them.
        """
        saving = [rank for rank in self.ranks if announced and rank.grace]
        for rank in self.ranks:
            if rank in saving:
                rank.forward_signal(signal.SIGTERM)
            else:
                rank.send_signal(signal.SIGTERM)
        seconds = max([_GRACE, *(rank.grace for rank in saving)])
        if announced and grace is not None:
            seconds = grace
        deadline = time.monotonic() + seconds
        while any(rank.exitcode is None for rank in self.ranks) and time.monotonic() < deadline:
            self._read_pipes(_TICK)
            for rank in self.ranks:
                rank.poll()

    def kill(self) -> None:
        """Kill every remaining process; call this before `close`."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Wait for killed ranks, write the remaining output, and free all resources."""
        try:
            for rank in self.ranks:
                rank.process.wait(_KILL)
            deadline = time.monotonic() + _DRAIN
            while self._selector.get_map() and time.monotonic() < deadline:
                self._read_pipes(_TICK)
            self._outputs.end()
        finally:
            for pipe in self._pipes.values():
                pipe.close()
            self._selector.close()
            self._port.close()
            if self._nodes is not None:
                self._nodes.close()

    def _read_pipes(self, seconds: float) -> None:
        """Wait up to ``seconds`` for output and messages of ranks; handle a piece of each."""
        for key, _ in self._selector.select(seconds):
            try:
                data = os.read(key.fd, 1 << 16)  # the capacity of a pipe
            except ConnectionResetError:  # A rank ended before it read its messages.
                data = b""
            key.data(data)
            if not data:
                self._selector.unregister(key.fd)
                self._pipes.pop(key.fd).close()

    def _read_from(self, pipe: IO[bytes] | socket.socket, take: Callable[[bytes], None]) -> None:
        self._pipes[pipe.fileno()] = pipe
        self._selector.register(pipe.fileno(), selectors.EVENT_READ, take)
