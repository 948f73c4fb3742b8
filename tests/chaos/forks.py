"""Ranks that are forks of the campaign, whose modules they have: a start takes no time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any


def fork_ranks(
    count: int,
    folder: Path,
    run: Callable[[], None],
    limit: float,
    variables: dict[str, Any],
    spared: Collection[int] = (),
) -> dict[int, int | None]:
    """Return the exit statuses by process, in rank order; None: it did not end within ``limit``.

    Each rank calls ``run`` with a launcher's variables; its output goes to the file "output" of
    ``folder``. Ranks in ``spared`` are not waited for. Those that have not ended are killed.
    """
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "TAGI_DDP_JOB": folder.name}
            sizes = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            _be_rank(folder, run, {**numbers, **sizes, **variables})
        pids.append(pid)
    statuses: dict[int, int | None] = dict.fromkeys(pids)
    awaited = [pid for rank, pid in enumerate(pids) if rank not in spared]
    deadline = time.monotonic() + limit
    while any(statuses[pid] is None for pid in awaited) and time.monotonic() < deadline:
        for pid in awaited:
            if statuses[pid] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                statuses[pid] = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.002)
    for pid in pids:
        if statuses[pid] is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return statuses


def _be_rank(folder: Path, run: Callable[[], None], variables: dict[str, Any]) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    output = os.open(folder / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = int(str(end.code))
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(status)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of JSON of a file, if there is one."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):  # It is being written.
            found.append(json.loads(line))
    return found


def running(pids: Iterable[int], seconds: float) -> list[int]:
    """Return the processes that still run after ``seconds``: the kernel takes a moment."""
    deadline = time.monotonic() + seconds
    known = [pid for pid in pids if pid]
    while True:
        alive = [pid for pid in known if _runs(pid)]
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
