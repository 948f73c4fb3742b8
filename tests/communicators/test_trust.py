"""Access to a job: for ranks with its secret, and for the same user's processes on this host."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.rank_pool import RankPool, free_port
from support.strangers import GUEST, HERE, NOBODY, RANK, place, started, store_prefix

from tagi_ddp.communicators.errors import BackendUnavailable
from tagi_ddp.communicators.init import init
from tagi_ddp.communicators.shm import rendezvous_name

PACKAGE = Path(__file__).parents[2] / "tagi_ddp"
# What runs code that it reads. `launch` sends functions to the ranks that it starts itself.
DANGEROUS = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
ALLOWED = {f"launcher/{name}.py" for name in ("launch", "pickling", "rank_process", "started_rank")}


def test_nothing_else_is_unpickled():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            if isinstance(node, ast.Attribute) and re.fullmatch(".*_object(_list)?", node.attr):
                value = node.value
                if isinstance(value, ast.Name) and value.id == "dist":
                    names = ["pickle"]  # as torch's collectives of objects do
            if DANGEROUS & {name.partition(".")[0] for name in names}:
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == ALLOWED


@pytest.mark.slow
def test_another_user_does_not_become_a_rank():
    """A guest that knows even the names in the store cannot take the place of a late rank."""
    user = NOBODY if os.geteuid() == 0 else os.geteuid()
    port = free_port()
    with started(RANK, 60, **place(0, port, TAGI_DDP_SECRET="ours")) as first:
        wait_for_port(port)
        with started(GUEST, port, user, store_prefix(b"ours"), HERE) as guest:
            assert guest.stdout is not None
            assert guest.stdout.readline() == "written\n", guest.communicate()[1]
            time.sleep(1)  # rank 1 is late
            with started(RANK, 60, **place(1, port, TAGI_DDP_SECRET="ours")) as second:
                outputs = [process.communicate(timeout=60) for process in (first, second)]
            assert "joined" not in guest.communicate(timeout=60)[0]
    assert [output for output, _ in outputs] == ["0 [3.0, 3.0, 3.0]\n", "1 [3.0, 3.0, 3.0]\n"]


@pytest.mark.slow
def test_ranks_with_other_secrets_are_told_so():
    port = free_port()
    with (
        started(RANK, 4, **place(0, port, TAGI_DDP_SECRET="one")) as first,
        started(GUEST, port, os.geteuid(), store_prefix(b"one"), HERE),
    ):
        _, errors = first.communicate(timeout=60)
    assert "the store's record of rank 1 is not signed with this job's secret" in errors.lower()
    assert "TAGI_DDP_SECRET" in errors


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        time.sleep(0.05)
    raise AssertionError("nobody listens there")


@pytest.mark.slow
def test_without_a_secret_one_warning():
    port = free_port()
    with (
        started(RANK, 60, **place(0, port, TAGI_DDP_SECRET="")) as first,
        started(RANK, 60, **place(1, port, TAGI_DDP_SECRET="")) as second,
    ):
        outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [output for output, _ in outputs] == ["0 [3.0, 3.0, 3.0]\n", "1 [3.0, 3.0, 3.0]\n"]
    assert outputs[0][1].count("this job has no secret") == 1
    assert "docs/security.md" in outputs[0][1]
    assert outputs[1][1] == ""


def listening_ports(process: int) -> set[str]:
    """Return the addresses, as the kernel's hex digits, at which a process listens."""
    inodes = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(path))
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                addresses.add(fields[1].partition(":")[0])
    return addresses


def listens_where(comm: Any) -> set[str]:
    """Make a communicator, a rank late, and return where this process listened meanwhile."""
    found: set[str] = set()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            found.update(listening_ports(os.getpid()))
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        with comm.split(0) as part:
            part.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
        with init(comm.backend, comm.rank, comm.size, job="where", timeout=20) as other:
            other.barrier()
    finally:
        stop.set()
        watcher.join()
    return found


def test_ranks_of_one_host_listen_on_its_loopback_alone(gloo: RankPool):
    found = set().union(*gloo.run(listens_where, size=2, fresh=True))
    assert found, "the store and the ranks' ports"
    assert found == {"0100007F"}


HOLDER = """
import os, socket, sys, time
os.setuid(int(sys.argv[1]))
holder = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
holder.bind("\\0" + sys.argv[2])
holder.listen()
print("held", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_another_user_took(rank):
    name = f"tagi_ddp/{os.geteuid()}/{rendezvous_name(f'taken {rank}/0')}"
    with started(HOLDER, NOBODY, name) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BackendUnavailable, match=f"taken by the user with number {NOBODY}"):
            init("shm", rank, 2, job=f"taken {rank}", timeout=0.5)


MEETING = """
import os, signal, sys
from tagi_ddp import init
print("here", flush=True)
try:
    with init("shm", int(sys.argv[1]), 2, job="one name", timeout=float(sys.argv[2])) as comm:
        comm.barrier()
except Exception as error:
    print(type(error).__name__, error.ranks, error, flush=True)
"""


def test_two_jobs_of_one_name_are_told_at_once():
    """Two ranks 0 at a time: their ranks might mix."""
    started_at = time.monotonic()
    with started(MEETING, 0, 60) as first, started(MEETING, 0, 60) as second:
        texts = [process.communicate(timeout=30)[0] for process in (first, second)]
    assert time.monotonic() - started_at < 20
    for text in texts:
        assert "two ranks have number 0" in text
        assert "TAGI_DDP_JOB" in text


def test_a_rank_0_that_is_stopped_is_named():
    with started(MEETING, 0, 60) as first:
        name = f"tagi_ddp/{os.geteuid()}/{rendezvous_name('one name/0')}"
        wait_until(lambda: f"@{name}" in Path("/proc/net/unix").read_text())
        first.send_signal(signal.SIGSTOP)
        with started(MEETING, 1, 0.5) as second:
            text = second.communicate(timeout=30)[0]
    assert "Timeout (0,) init on rank 1 of 2 (shm): rank 0 is there, but did not answer" in text


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_only_the_secret_foretells_names(monkeypatch):
    names = {rendezvous_name("a job")}
    for secret in ("", "one", "another"):
        monkeypatch.setenv("TAGI_DDP_SECRET", secret)
        names.add(rendezvous_name("a job"))
        assert rendezvous_name("a job") in names
    assert len(names) == 4


def test_what_launch_sends_is_for_its_user_alone():
    from tagi_ddp import launch

    def modes() -> list[int]:
        files = [path for path in Path("/proc/self/fd").iterdir() if path.exists()]
        return [p.stat().st_mode & 0o777 for p in files if "tagi_ddp.launch" in os.readlink(p)]

    assert launch(modes, 1, timeout=60) in ([[0o600]], [[]])
