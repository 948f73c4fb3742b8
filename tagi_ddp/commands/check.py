"""Checks of the doctor, each run in a process of its own.

A broken library crashes or hangs any process that loads it. All checks run at once, with one time
limit; a check that crashes or hangs is a finding, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

Status = Literal["ok", "missing", "broken"]

_KILL = 5.0  # seconds for the kernel to carry out SIGKILL
_LONGEST = 1000  # maximum length of a detail, which may hold another library's text


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    ``status`` is "ok"; "missing": absent, but optional; or "broken": present but unusable, or
    absent though required. ``remedy`` is empty if all is well; ``facts`` are for the verdict.
    """

    status: Status
    detail: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


Findings = Mapping[str, Finding]


@dataclass(frozen=True)
class Check:
    """A check, and the remedy for a finding that has none of its own."""

    run: Callable[[], Finding]
    remedy: str


def run_all(checks: Mapping[str, Check], limit: float) -> dict[str, Finding]:
    """Run ``checks``, for ``limit`` seconds at most, and return what they found, by their names."""
    with ExitStack() as stack:
        # Children of a killed process may still write to it.
        temporary = TemporaryDirectory(prefix="tagi_ddp-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        processes = {
            name: stack.enter_context(Process(name, check, folder))
            for name, check in checks.items()
        }
        deadline = time.monotonic() + limit
        found = {name: process.finding(deadline, limit) for name, process in processes.items()}
    for name, finding in found.items():
        detail = " ".join(finding.detail.split())[:_LONGEST]
        remedy = "" if finding.status == "ok" else finding.remedy or checks[name].remedy
        found[name] = replace(finding, detail=detail, remedy=remedy)
    return found


class Process:
    """The process of one check, with its files in ``folder``; a context manager that ends it."""

    def __init__(self, name: str, check: Check, folder: Path) -> None:
        """Start the process."""
        self._remedy = check.remedy
        # Files, not pipes: a child that inherits a pipe would keep it open.
        self._report = folder / f"{name}.json"
        self._errors = folder / f"{name}.err"
        # Open MPI leaves its files behind when it is started without mpirun.
        folders = {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": str(folder)}
        # The process finds this package where this one found it.
        code = (
            f"import sys; sys.path[:] = {[str(entry) for entry in sys.path]!r}; "
            "from tagi_ddp.commands.checks import run_check; run_check()"
        )
        with self._report.open("wb") as report, self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(os.getpid()), name],
                stdin=subprocess.DEVNULL,
                stdout=report,
                stderr=errors,
                env={**os.environ, **folders},
                start_new_session=True,  # a group to end, without the terminal's Ctrl-C
            )

    def __enter__(self) -> Process:
        """Return the process itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and those that it started."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL)

    def finding(self, deadline: float, limit: float) -> Finding:
        """Return the check's finding, or one about how the process ended."""
        try:
            status = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            remedy = f"{self._remedy}; if this machine is slow: --timeout {2 * limit}"
            return Finding("broken", f"did not end within {limit:g} s", remedy)
        report = self._report.read_bytes()
        if status == 0 and report:
            return Finding(**json.loads(report))
        what = f"its check ended with exit status {status}"
        if status < 0:
            what = f"its check was ended by signal {-status} ({signal.strsignal(-status)})"
        last_line = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
        return Finding("broken", ": ".join([what, *last_line]))


def report(check: Check, parent: int) -> None:
    """Run a check and write its finding to standard output; end if the process ``parent`` does."""
    from tagi_ddp.launcher.rank_process import die_with_parent

    die_with_parent(parent)
    output = os.dup(1)
    os.dup2(2, 1)  # Output of libraries is no finding.
    try:
        finding = check.run()
    except Exception as error:
        finding = Finding("broken", f"{type(error).__name__}: {error}")
    os.write(output, json.dumps(asdict(finding)).encode())
