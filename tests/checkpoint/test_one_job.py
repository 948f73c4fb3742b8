"""One job saves into a folder at a time, and storage that stalls is named within the limit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.networks import fresh
from support.rank_pool import RankPool
from support.reports import Report, report, report_if_any

from tagi_ddp import DDPSequential
from tagi_ddp.checkpoint import CheckpointError, Checkpoints, owner
from tagi_ddp.checkpoint.array_file import ArrayFile
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.communicators.single import SingleCommunicator

# Another job: it holds the folder until its input ends, or until it is killed.
JOB = """
import sys
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim import SyncSchedule
part = {"schedule": SyncSchedule(2, 0, 1)}
checkpoints = Checkpoints(sys.argv[1], part, communicator=SingleCommunicator())
checkpoints.save(1)
checkpoints.wait()
print("begun", flush=True)
sys.stdin.read()
"""
# Another process, which tells whether it can lock the folder as a job does that begins.
LOCK = """
import fcntl, sys
with open(sys.argv[1] + "/.lock", "r+") as file:
    try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError: print("owned")
"""


@contextmanager
def another_job(folder: Path) -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with job:
        assert job.stdout is not None
        assert job.stdout.readline() == "begun\n"
        yield job
        job.kill()


def is_owned(folder: Path) -> bool:
    command = [sys.executable, "-S", "-c", LOCK, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout != ""


def begun(comm: Any, folder: str) -> Report:
    model = DDPSequential(fresh("mlp"), communicator=comm)
    return report_if_any(lambda: Checkpoints(folder, model).close())


def test_a_second_job_is_refused_on_all_ranks(shm: RankPool, tmp_path: Path) -> None:
    """Until the first one has ended, as by a kill; nothing of it is removed."""
    saving = tmp_path / ".saving-000007-step-9-0123456789abcdef"
    with another_job(tmp_path) as job:
        saving.mkdir()
        for kind, text, _ in shm.run(begun, str(tmp_path), size=2, timeout=5):
            assert kind == "CheckpointError"
            assert f"process {job.pid} on host {socket.gethostname()} since 20" in text
            assert "end that job, or give another folder" in text
    assert saving.is_dir()
    assert [kind for kind, *_ in shm.run(begun, str(tmp_path), size=2)] == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "000001-step-1", "latest"]


def own(folder: Path) -> Checkpoints:
    parts = {"own": Part()}
    return Checkpoints(folder, parts, communicator=SingleCommunicator())


class Part:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_a_process_may_open_a_folder_again(tmp_path: Path) -> None:
    """As a cell of a notebook that runs again; it owns the folder until all have been closed."""
    first, second = own(tmp_path), own(tmp_path)
    first.close()
    first.close()
    assert is_owned(tmp_path)
    with own(tmp_path / "." / "x" / ".."):
        pass
    assert is_owned(tmp_path)
    second.close()
    assert not is_owned(tmp_path)
    assert owner._held == {}


def test_what_does_not_begin_does_not_own_the_folder(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Folder, "clear", lambda self: 1 / 0)
        with pytest.raises(CheckpointError, match="cannot be used: ZeroDivisionError"):
            own(tmp_path)
    assert not is_owned(tmp_path)


def test_a_folder_that_is_made_anew(tmp_path: Path) -> None:
    """While the former one is open: a lock of the old file is none of the new one."""
    folder = tmp_path / "run"
    first = own(folder)
    (folder / ".lock").unlink()
    folder.rmdir()
    second = own(folder)
    first.close()
    assert is_owned(folder)
    second.close()
    assert not is_owned(folder)


def left_behind(comm: Any, folder: str) -> list[Report]:
    """Rank 1 has not closed what the others have closed; rank 0 begins again all the same."""
    model = DDPSequential(fresh("mlp"), communicator=comm)
    former = Checkpoints(folder, model)
    if comm.rank == 0:
        former.close()
    comm.barrier()
    reports = [report_if_any(lambda: Checkpoints(folder, model).close())]
    former.close()
    return reports


def test_ranks_that_still_hold_a_folder_do_not_hinder_their_own_job(
    shm: RankPool, tmp_path: Path
) -> None:
    assert shm.run(left_behind, str(tmp_path), size=2) == [[("", "", ())]] * 2


def test_a_child_owns_nothing(tmp_path: Path) -> None:
    with own(tmp_path) as checkpoints:
        child = os.fork()
        if child == 0:
            held = dict(owner._held)
            checkpoints._owner.release()
            os._exit(len(held))
        assert os.waitpid(child, 0)[1] == 0
        assert is_owned(tmp_path)


def test_a_file_system_without_locks(tmp_path: Path) -> None:
    def no_locks(*arguments: Any) -> None:
        raise OSError(37, "No locks available")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner.fcntl, "lockf", no_locks)
        with pytest.warns(RuntimeWarning, match=r"\.lock cannot be locked .*: give each job"):
            checkpoints = own(tmp_path)
        with checkpoints:
            checkpoints.save(1)
    assert (tmp_path / "latest" / "run.json").exists()


def test_numbers_that_another_job_has_taken(tmp_path: Path) -> None:
    """Without locks: neither is replaced, and the one that was whole last is the last."""
    with own(tmp_path) as checkpoints:
        (tmp_path / "000001-step-5").mkdir()
        (tmp_path / "000001-step-5" / "run.json").touch()
        checkpoints.save(5)
        checkpoints.save(7)
    names = sorted(path.name for path in tmp_path.glob("*-step-*"))
    assert names == ["000001-step-5", "000002-step-5", "000003-step-7"]
    assert (tmp_path / "latest").resolve().name == names[-1]


def resumed_at_once(comm: Any, folder: str) -> int:
    """Return the step from which ranks go on just after a save for which rank 1 takes longer."""
    model = DDPSequential(fresh("mlp"), communicator=comm)
    with Checkpoints(folder, model) as checkpoints:
        write = checkpoints._folder.write

        def slowly(*arguments: Any) -> None:
            time.sleep(0.3 * comm.rank)
            write(*arguments)

        checkpoints._folder.write = slowly  # type: ignore[method-assign]
        checkpoints.save(3)
        return checkpoints.resume()


def test_a_resume_waits_for_the_files_of_all_ranks(shm: RankPool, tmp_path: Path) -> None:
    assert shm.run(resumed_at_once, str(tmp_path), size=2) == [3, 3]


# --- storage that stalls --------------------------------------------------------------------------

TIMEOUT = 4.0


def stalled(comm: Any, folder: str, ranks: list[int], where: str) -> list[Report]:
    """Return how saving, beginning or resuming ends when some ranks' disks do not answer."""
    never = threading.Event()

    def stall(*arguments: Any, **options: Any) -> None:
        never.wait()

    model = DDPSequential(fresh("mlp"), communicator=comm)
    with pytest.MonkeyPatch.context() as patch:
        owners = {"write": (Folder, "write"), "fsync": (os, "fsync"), "clear": (Folder, "clear")}
        owners.update(look=(Folder, "last"), verify=(ArrayFile, "verify"))
        if where == "clear":
            if comm.rank in ranks:
                patch.setattr(*owners[where], stall)
            return [report(lambda: Checkpoints(folder, model))]
        checkpoints = Checkpoints(folder, model)
        checkpoints.save(1)
        checkpoints.wait()
        if comm.rank in ranks:
            patch.setattr(*owners[where], stall)
        if where in ("look", "verify"):
            reports = [report(checkpoints.resume)]
        else:
            checkpoints.save(2)
            reports = [report(lambda: checkpoints.save(3)), report(checkpoints.wait)]
        patch.undo()
        never.set()
    report_if_any(checkpoints.close)
    return reports


@pytest.mark.parametrize(
    ("where", "ranks", "text"),
    [
        ("write", [1], "rank-1.safetensors has not been written within 2.8 s"),
        ("fsync", [0, 1], "rank-{}.safetensors has not been written within 2.8 s"),
        pytest.param("clear", [0], "has not been read within 2.8 s", marks=pytest.mark.slow),
        pytest.param("look", [0], "has not been read within 2.8 s", marks=pytest.mark.slow),
        ("verify", [1], "000001-step-1 has not been read within 2.8 s"),
    ],
)
def test_storage_that_stalls_is_named(
    shm: RankPool, tmp_path: Path, where: str, ranks: list[int], text: str
) -> None:
    arguments = (stalled, str(tmp_path / "run"), ranks, where)
    for rank, reports in enumerate(shm.run(*arguments, size=2, timeout=TIMEOUT, fresh=True)):
        for kind, told, _ in reports:
            assert kind == "CheckpointError"
            assert text.format(rank) in told
            assert f"{tmp_path}/run" in told
            assert "the storage of the folder does not answer" in told


STALLED = """
import sys, threading
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim import SyncSchedule
Folder.write = lambda *arguments: threading.Event().wait()
part = {"schedule": SyncSchedule(2, 0, 1)}
with Checkpoints(sys.argv[1], part, communicator=SingleCommunicator(1.0)) as checkpoints:
    checkpoints.save(1)
"""


def test_a_process_ends_though_its_storage_stalls(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STALLED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert "rank-0.safetensors has not been written within 0.7 s" in ended.stderr
