"""Starts the ranks of one host, forwards what they print, and ends all when one of them fails."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import IO

from tagi_ddp.environment import shows_bars
from tagi_ddp.launcher.elastic import ElasticJob, name_of, number_of
from tagi_ddp.launcher.failure import Failure, LaunchError, Restarts
from tagi_ddp.launcher.meeting import variables
from tagi_ddp.launcher.nodes import Nodes, Place, new_job
from tagi_ddp.launcher.rank_output import Output, RankStream, Screen
from tagi_ddp.launcher.started_rank import Start, StartedRank

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
    restarts: Restarts | None = None,
    signals: list[int] | None = None,
) -> list[bytes | None]:
    """Run ``command`` (see `rank_process.main`) on ``nprocs`` ranks until all are done.

    With ``nodes`` they are a part of a job, which other hosts' ranks end as well. Returns the
    ranks' pickled results, for a script None. Raises LaunchError for the first rank that failed,
    TimeoutError after ``timeout`` seconds. When it returns or raises, whatever the ranks started is
    gone too, and what they printed has been written, or OSError says why not. A signal handler may
    append to ``signals``: they are sent to the process of each rank.

    A job is elastic if its ranks ask for it (`meeting.Meeting.come`): when one of them is lost the
    others go on, and a new one takes its place while there are ``restarts``.
    """
    team = _Team(nodes, restarts or Restarts(0), [] if signals is None else signals)
    try:
        team.start(command, nprocs, pass_fds)
        failure = team.watch(timeout, needs_result=command[0] == "call")
    finally:
        # A second Ctrl-C, at any call, ends the ranks' grace and leaves none of them.
        try:
            team.terminate()
        finally:
            try:
                team.kill()
            finally:
                team.kill()
                team.close()
    if failure is not None:
        raise LaunchError(
            f"rank {failure.rank} of {team.world_size} {failure.text}",
            failure.rank,
            failure.exitcode,
            failure.traceback,
        )
    team.check_output()
    return [rank.report.get("result") for rank in sorted(team.ranks, key=lambda r: r.number)]


class _Team:
    """All ranks and their pipes."""

    def __init__(self, nodes: Nodes | None, restarts: Restarts, signals: list[int]) -> None:
        self.ranks: list[StartedRank] = []
        self.world_size = 0
        self._nodes = nodes
        self._restarts = restarts
        self._signals = signals  # that the ranks are to get
        self._losses: list[Failure] = []  # of ranks without which the others have gone on
        self._attempts: Counter[int] = Counter()
        self._job: ElasticJob | None = None  # of all hosts' ranks, if they meet here
        self._port = reserve_port(one_host=nodes is None)
        self._screen = Screen()
        self._stdout, self._stderr = Output(sys.stdout), Output(sys.stderr)
        self._selector = selectors.DefaultSelector()
        self._pipes: dict[int, IO[bytes] | socket.socket] = {}  # that may hold something

    def start(self, command: Sequence[str], nprocs: int, pass_fds: Sequence[int]) -> None:
        """Start all ranks; none goes on when this is interrupted."""
        address, port = self._port.getsockname()[:2]
        if self._nodes is None:
            place = Place(0, nprocs, new_job(), secrets.token_hex(32), address, port)
        else:
            place = self._nodes.join(nprocs, port)
        self.world_size = place.world_size
        starts = [
            Start(place.first + local, command, _environment(local, nprocs, place), pass_fds)
            for local in range(nprocs)
        ]
        self._start_ranks(starts)
        if self._nodes is None or self._nodes.decides:
            names = [name_of(number, 1) for number in range(self.world_size)]
            self._job = ElasticJob(names, self._tell, partial(self._end_of, place))

    def _end_of(self, place: Place, name: str) -> tuple[int, str, int]:
        if self._nodes is not None:
            return self._nodes.end_of(number_of(name))
        return 0, place.address, place.port

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
        self._read_from(rank.meeting, partial(self._hear, rank))
        process = rank.process
        stdout = (process.stdout, self._stdout, sys.stdout)
        stderr = (process.stderr, self._stderr, sys.stderr)
        for pipe, output, file in (stdout, stderr):
            assert pipe is not None
            stream = RankStream(self._screen, rank.number, output, shows_bars(file))
            self._read_from(pipe, stream.feed)

    # --- elastic jobs -------------------------------------------------------------------------

    def _hear(self, rank: StartedRank, data: bytes) -> None:
        message = json.loads(data) if data else None
        if message is not None and "outlives" in message:
            rank.outlives = message["outlives"]
        elif self._job is not None:
            self._job.hear(rank.name, message, time.monotonic())
        elif self._nodes is not None and message is not None:
            self._nodes.say(rank.name, message)

    def _tell(self, name: str, message: str) -> None:
        for rank in self.ranks:
            if rank.name == name:
                with contextlib.suppress(OSError):  # it may have ended
                    rank.meeting.send(message.encode())
                return
        if self._nodes is not None and self._nodes.decides:
            self._nodes.tell(name, message)

    def _meet(self, job: ElasticJob, now: float) -> None:
        """Let the ranks of an elastic job go on without those that are lost, and with new ones."""
        for rank in self.ranks:
            if rank.exitcode is not None:
                job.gone(rank.name)
        if self._nodes is not None:
            for name, message in self._nodes.take_said():
                job.hear(name, message, now)
            job.lose(self._nodes.lost)
        if job.update(now):
            self._losses.clear()
        self._survive([rank.number for rank in self.ranks if job.outlives(rank.number)])
        for failure in [] if self._nodes is None else self._nodes.survive(job.outlives):
            self._losses.append(failure)
            if self._nodes and failure.rank in self._nodes.lost:  # its launcher cannot say so
                self._say(f"rank {failure.rank} {failure.text}; the others go on")

    def _fatal(self, job: ElasticJob) -> list[Failure]:
        """Return the failures that end the job, with those that it has outlived until now."""
        failures = [rank.failure for rank in self.ranks if rank.failure is not None]
        if self._nodes is not None:
            failures += self._nodes.failures
        failures = [failure for failure in failures if not job.outlives(failure.rank)]
        return failures + self._losses if failures or job.lost else []

    def _survive(self, numbers: Collection[int]) -> None:
        """Go on without those of these ranks that have ended in a failure."""
        for rank in [each for each in self.ranks if each.number in numbers]:
            if rank.exitcode is not None and rank.failure is not None:
                self._go_on_without(rank, rank.failure)

    def _go_on_without(self, rank: StartedRank, failure: Failure) -> None:
        rank.send_signal(signal.SIGKILL)  # what it has started
        rank.process.wait(_KILL)
        self.ranks.remove(rank)
        self._losses.append(failure)
        what = "failed" if failure.traceback else failure.text
        then = "the others go on"
        if self._restarts.left:
            self._restarts.left -= 1
            self._start_ranks([rank.start])
            then += ", and a new one starts"
        self._say(f"rank {rank.number} {what}; {then}")

    def _say(self, text: str) -> None:
        self._screen.end_bar()
        self._stderr.write(f"tagi-ddp: {text}\n")
        self._stderr.flush()

    def check_output(self) -> None:
        """Raise OSError if something that the ranks have printed could not be written."""
        for output in (self._stdout, self._stderr):
            if output.error is not None:
                raise output.error

    def watch(self, timeout: float | None, needs_result: bool) -> Failure | None:
        """Wait until all ranks have ended well (None) or it is known which one failed first."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        settled = math.inf
        while True:
            self._pump(_TICK)
            self.check_output()
            while self._signals:
                number = self._signals.pop(0)
                for rank in self.ranks:
                    rank.forward_signal(number)
            for rank in self.ranks:
                rank.poll()
            running = [rank.number for rank in self.ranks if self._counts(rank)]
            self._pump(0)  # the last words of ranks that have ended are in the pipes
            for rank in self.ranks:
                rank.judge(needs_result)
            now = time.monotonic()
            failures = [rank.failure for rank in self.ranks if rank.failure is not None]
            leaving = [rank.number for rank in self.ranks if rank.leaving]
            more = False  # whether other hosts' ranks run
            if self._nodes is not None:
                told = [failure for failure in failures if failure.rank not in leaving]
                ended = [rank.name for rank in self.ranks if rank.exitcode is not None]
                self._nodes.exchange(told, ended, done=not running and not failures)
                if self._nodes.over:
                    return self._nodes.verdict
                for name, text in self._nodes.take_told():
                    self._tell(name, text)
                self._survive(self._nodes.take_survived())
                more = self._nodes.running
            if self._job is not None:
                self._meet(self._job, now)
                failures = self._fatal(self._job)
                more = more and not self._job.ended
            if self._nodes is None or self._nodes.decides:
                if failures:
                    first = min(failures, key=Failure.order)
                    settled = min(settled, now + _SETTLE)
                    known = not first.consequence and first.rank not in leaving
                    over = known or not (running or more) or now >= settled
                    if over and not self._goes_on():
                        return self._end_job(first)
                elif not (running or more):
                    return self._end_job(None)
            if timeout is not None and now >= deadline:
                raise TimeoutError(
                    f"ranks {running} of {self.world_size} were still running after "
                    f"{round(timeout, 2):g} seconds; all were ended"
                )

    def _goes_on(self) -> bool:
        """Return whether ranks of a job of one host outlive those that have failed."""
        failed = [rank.outlives for rank in self.ranks if rank.failure is not None]
        left = [rank.outlives for rank in self.ranks if rank.failure is None and self._counts(rank)]
        return self._nodes is None and all(failed) and any(left)

    def _counts(self, rank: StartedRank) -> bool:
        """Tell whether the job waits for its end; not if it has not become one of a group."""
        job = self._job
        waits = job is None or not job.used or rank.name in job.group
        return rank.exitcode is None and waits

    def _end_job(self, verdict: Failure | None) -> Failure | None:
        if self._nodes is not None:
            self._nodes.end(verdict)
        return verdict

    def terminate(self) -> None:
        """Ask every process that is left to end, and wait for the ranks a moment."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE
        while any(rank.exitcode is None for rank in self.ranks) and time.monotonic() < deadline:
            self._pump(_TICK)
            for rank in self.ranks:
                rank.poll()

    def kill(self) -> None:
        """Kill every process that is left; `close` must not have been called."""
        for rank in self.ranks:
            rank.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Wait for killed ranks, write what all still said, and free everything."""
        try:
            for rank in self.ranks:
                rank.process.wait(_KILL)
            deadline = time.monotonic() + _DRAIN
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
            try:
                data = os.read(key.fd, 1 << 16)  # as much as a pipe holds
            except ConnectionResetError:  # a rank ended before it had read what it was told
                data = b""
            key.data(data)
            if not data:
                self._selector.unregister(key.fd)
                self._pipes.pop(key.fd).close()

    def _read_from(self, pipe: IO[bytes] | socket.socket, take: Callable[[bytes], None]) -> None:
        self._pipes[pipe.fileno()] = pipe
        self._selector.register(pipe.fileno(), selectors.EVENT_READ, take)


def _environment(local: int, nprocs: int, job: Place) -> dict[str, str]:
    """Return this process's environment with the rank's place in it, as torchrun sets it too."""
    # torch would ask the agent of an outer torchrun for the address of rank 0.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    place = (job.first + local, job.world_size, local, nprocs)
    cores = len(os.sched_getaffinity(0))
    return {
        "OMP_NUM_THREADS": str(max(1, cores // nprocs)),
        "TAGI_DDP_TERMINAL": str(int(shows_bars(sys.stderr))),
        **inherited,
        **variables(*place, job.job, job.address, job.port),
        "TAGI_DDP_SECRET": job.secret,
    }


def reserve_port(one_host: bool = True) -> socket.socket:
    """Return a socket at a TCP port that nobody else is given while it is open.

    On the loopback interface, of IPv4 if there is one, or on all interfaces. It does not listen,
    and others may reuse its address: so a store can listen there.
    """
    try:
        return _bound(socket.AF_INET, "127.0.0.1" if one_host else "")
    except OSError:
        if not one_host:
            raise
        return _bound(socket.AF_INET6, "::1")


def _bound(family: int, address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
    except BaseException:
        holder.close()
        raise
    return holder
