"""The entry point of a rank that `tagi_ddp.launcher.supervisor` started."""

from __future__ import annotations

import ctypes
import io
import linecache
import mmap
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypedDict

from tagi_ddp.communicators.errors import PeerLost
from tagi_ddp.elastic.connection import open_launcher_connection
from tagi_ddp.launcher.pickling import dumps
from tagi_ddp.launcher.restarts import cause_of
from tagi_ddp.trace import script_step

_PR_SET_PDEATHSIG = 1

_process = 0  # The rank's pid. Its forks inherit the report pipe but must not write to it.


class Report(TypedDict, total=False):
    """A rank's report to the supervisor, pickled: a result, an error, or an exit status."""

    result: bytes
    """The return value of ``fn``, pickled."""
    traceback: str
    """The text of the error."""
    status: int
    """The status of ``sys.exit``, if it is not 0; the process may end seconds later."""
    time: float
    """The time of the error, by time.monotonic(), a clock that all processes of a host share."""
    consequence: bool
    """True if the loss of another rank caused the error."""
    cause: str
    """See `Failure`."""


def main() -> None:
    """Run sys.argv: ``parent-pid gate-fd report-fd launcher-fd kind target arguments...``."""
    global _process
    _process = os.getpid()
    parent, gate, report_fd, launcher_fd = (int(text) for text in sys.argv[1:5])
    kind, target, *arguments = sys.argv[5:]
    die_with_parent(parent)
    for descriptor in (report_fd, launcher_fd):
        os.set_inheritable(descriptor, False)
    open_launcher_connection(launcher_fd)
    # The supervisor writes a byte once all ranks are started; if it gives up, it closes the gate.
    if not os.read(gate, 1):
        os._exit(1)
    os.close(gate)
    for stream in (sys.stdout, sys.stderr):
        assert isinstance(stream, io.TextIOWrapper)
        # The supervisor reads UTF-8 and writes it in the encoding of the user's terminal.
        stream.reconfigure(encoding="utf-8", errors=stream.errors, line_buffering=True)
    if kind == "call":
        _call(report_fd, int(target))
    else:
        _run(report_fd, kind, target, arguments)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when ``parent``, which started it, ends."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # The parent ended before the call above.
        os._exit(1)


def _call(report_fd: int, payload_fd: int) -> None:
    """Call the pickled function and report its result or its error."""
    try:
        with mmap.mmap(payload_fd, 0, access=mmap.ACCESS_READ) as payload:
            sources, call = pickle.loads(payload)
        os.close(payload_fd)
        linecache.cache.update(sources)
        function, args, kwargs = pickle.loads(call)
        result = _pickled(function(*args, **kwargs))
    except SystemExit as leaving:
        _exit(report_fd, leaving)
    except BaseException as error:
        if _is_forked():
            raise  # Python prints it; a fork sends no report.
        _fail(report_fd, error, show=False)
    _send(report_fd, {"result": result})


def _pickled(result: Any) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        raise TypeError(
            f"the function's result, a {type(result).__name__}, cannot be sent back ({error}): "
            "return numbers, numpy arrays, or containers of them, such as a state_dict"
        ) from None


def _run(report_fd: int, kind: str, target: str, arguments: list[str]) -> None:
    """Run a script or a module as ``python target`` or ``python -m target`` does."""
    sys.argv = [target, *arguments]
    try:
        if kind == "module":
            sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as leaving:
        _exit(report_fd, leaving)
    except BaseException as error:
        _fail(report_fd, error, show=True)


def _own_frames_off(frames: TracebackType | None) -> TracebackType | None:
    """Drop the outermost frames, which are this file's and runpy's."""
    while frames is not None:
        name = frames.tb_frame.f_code.co_filename
        if name != __file__ and Path(name).name not in ("runpy.py", "<frozen runpy>"):
            break
        frames = frames.tb_next
    return frames


def _exit(report_fd: int, leaving: SystemExit) -> NoReturn:
    """Exit with the script's status; report it to the supervisor at once if it is not 0."""
    status = leaving.code or 0
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    if status := status & 0xFF:
        _send(report_fd, {"status": status, **_about(leaving, f"exit status {status}")})
    sys.exit(status)


def _fail(report_fd: int, error: BaseException, show: bool) -> NoReturn:
    """Report an error to the supervisor and exit; if ``show``, print it as Python does."""
    about = _about(error, f"{type(error).__name__}: {error}")
    frames = _own_frames_off(error.__traceback__)
    text = "".join(traceback.format_exception(type(error), error, frames))
    if show:
        sys.excepthook(type(error), error.with_traceback(frames), frames)
    sys.last_value = error  # Exit handlers send it to other ranks.
    _send(report_fd, {"traceback": text, **about})
    sys.exit(1)


def _about(error: BaseException, text: str) -> Report:
    """Return the entries of a report that each error has."""
    cause = cause_of(text, script_step.number, script_step.began)
    return {"time": time.monotonic(), "consequence": _is_consequence(error), "cause": cause}


def _is_consequence(error: BaseException) -> bool:
    """Return whether the root cause of an error is the loss of a rank."""
    root = error
    while cause := root.__cause__ or (None if root.__suppress_context__ else root.__context__):
        root = cause
    return isinstance(root, PeerLost)


def _is_forked() -> bool:
    return os.getpid() != _process


def _send(report_fd: int, report: Report) -> None:
    if _is_forked():
        return
    with os.fdopen(report_fd, "wb") as pipe:
        pickle.dump(report, pipe)
