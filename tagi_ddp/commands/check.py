"""What a check is, and how it is run.

A broken library crashes or hangs whatever loads it. So each check runs in a process of its own, all
at once and with one limit, and whatever happens to it is what is found.
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
_LONGEST = 1000  # characters of a detail, which may hold another library's text


@dataclass(frozen=True)
class Finding:
    """What one check found.

    ``status`` is "ok"; "missing": not there, but optional; or "broken": there but cannot work, or
    required and not there. ``remedy`` is empty if all is well; ``facts`` are for the verdict.
    """

    status: Status
    detail: str
    remedy: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


Findings = Mapping[str, Finding]


@dataclass(frozen=True)
class Check:
    """How to find out, and what to do about what is not well, if nothing better is known."""

    run: Callable[[], Finding]
    remedy: str


def run_all(checks: Mapping[str, Check], limit: float) -> dict[str, Finding]:
    """Run ``checks``, for ``limit`` seconds at most, and return what they found, by their names."""
    with ExitStack() as stack:
        # What a killed process started may write to the last moment.
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
    """The process of one check; a context that ends it. Its files are in ``folder``."""

    def __init__(self, name: str, check: Check, folder: Path) -> None:
        """Start it."""
        self._remedy = check.remedy
        # Files, not pipes: processes that inherit them are not waited for.
        self._report = folder / f"{name}.json"
        self._errors = folder / f"{name}.err"
        # Open MPI, started without mpirun, leaves its files.
        places = {"TMPDIR": str(folder), "OMPI_MCA_btl_sm_backing_directory": str(folder)}
        # It finds this package where this process found it.
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
                env={**os.environ, **places},
                start_new_session=True,  # a group to end, and no Ctrl-C of the terminal
            )

    def __enter__(self) -> Process:
        """Return the process itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and what it has started."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_KILL)

    def finding(self, deadline: float, limit: float) -> Finding:
        """Wait for the check's finding, or make one of what happened to it."""
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
        last_words = self._errors.read_text(errors="replace").strip().splitlines()[-1:]
        return Finding("broken", ": ".join([what, *last_words]))


def report(check: Check, parent: int) -> None:
    """Write what a check finds to standard output; in a process that ends with ``parent``."""
    from tagi_ddp.launcher.rank_process import die_with_parent

    die_with_parent(parent)
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no finding
    try:
        finding = check.run()
    except Exception as error:
        finding = Finding("broken", f"{type(error).__name__}: {error}")
    os.write(output, json.dumps(asdict(finding)).encode())
