"""A rank as its launcher sees it: a process and its report."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from tagi_ddp.elastic.membership import name_of
from tagi_ddp.launcher.failure import Failure
from tagi_ddp.launcher.rank_process import Report


@dataclass(frozen=True)
class Start:
    """The start of a rank: its number, command, environment, and descriptors to pass on."""

    number: int
    command: Sequence[str]
    environment: dict[str, str]
    pass_fds: Sequence[int]


class StartedRank:
    """A process that waits for a byte from ``gate``; ``attempt`` counts the starts of a rank."""

    def __init__(self, start: Start, attempt: int, gate: int) -> None:
        self.start = start
        self.number = start.number
        self.attempt = attempt
        self.started = time.monotonic()
        self.report: Report = {}
        self.exitcode: int | None = None
        self.failure: Failure | None = None
        self.outlives = False  # True if it goes on when another such rank is lost.
        self.grace = 0.0  # seconds that it has asked for between SIGTERM and SIGKILL
        self._received = bytearray()
        # The rank finds this package where this process found it.
        code = (
            f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
            "from tagi_ddp.launcher.rank_process import main; main()"
        )
        reader, writer = os.pipe()
        self.reports: IO[bytes] = open(reader, "rb", buffering=0)  # noqa: SIM115  (a pipe to read)
        self.connection, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.connection.setblocking(False)
        numbers = [os.getpid(), gate, writer, child_end.fileno()]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, *map(str, numbers), *start.command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=[*numbers[1:], *start.pass_fds],
                env=start.environment,
                start_new_session=True,  # a group to signal, without the terminal's Ctrl-C
            )
        except BaseException:
            self.reports.close()
            self.connection.close()
            raise
        finally:
            os.close(writer)
            child_end.close()

    @property
    def name(self) -> str:
        """The name of this process, unique in the job."""
        return name_of(self.number, self.attempt)

    def receive(self, data: bytes) -> None:
        """Add a piece of the report; b"" ends it."""
        self._received += data
        if data or not self._received:
            return
        try:
            self.report = pickle.loads(self._received)
        except (pickle.UnpicklingError, EOFError):  # The rank was killed while it wrote.
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
            self.report["cause"],
        )

    @property
    def leaving(self) -> bool:
        """True if the process is about to end by itself; it may still write output."""
        return "status" in self.report and self.exitcode is None

    def poll(self) -> None:
        """Check whether the process has ended; do not reap it, as its pid names its group."""
        if self.exitcode is not None:
            return
        info = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None:
            exited = info.si_code == os.CLD_EXITED
            self.exitcode = info.si_status if exited else -info.si_status

    def check_exit(self, needs_result: bool) -> None:
        """Set `failure` if the process has ended and has failed."""
        if self.failure is not None or self.exitcode is None:
            return
        self.receive(b"")  # A process that it forked may keep the pipe open.
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

    def forward_signal(self, number: int) -> None:
        """Send a signal to the rank's process only: its children may have no handler."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.process.pid, number)

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the rank and to the processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # Real-time signals have no names.
        return f"signal {number}"
