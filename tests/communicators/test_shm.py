"""The contract over shared memory; and how a process ends."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest
from contract.whole import WholeContract
from support.rank_pool import worker_environment


@pytest.mark.ranks("shm", 2, 4)
class TestShm(WholeContract):
    """Through the memory of one host."""


@pytest.mark.slow
@pytest.mark.ranks("shm", 3)
class TestShmOfThree(WholeContract):
    """Through the memory of one host."""


UNDER_WAY = """
import sys, time
import numpy as np
import tagi_ddp


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # when the interpreter ends


comm = tagi_ddp.init(timeout=20)
if comm.rank == 0:
    sys.work, sys.slow = comm.all_reduce(np.ones(1000), async_op=True), Slow()
else:
    time.sleep(1)
print("the end", flush=True)
"""


def test_a_process_ends_well_with_work_under_way(tmp_path: Path) -> None:
    """Of a call that rank 1 does not make, and of which nobody wants to know."""
    (tmp_path / "script.py").write_text(UNDER_WAY)
    done = subprocess.run(
        [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", "script.py"],
        cwd=tmp_path,
        env=worker_environment({}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == ["[0] the end", "[1] the end"]


RANK = """
import sys
from tagi_ddp import init
try:
    with init("shm", int(sys.argv[1]), 3, job=sys.argv[2], timeout=90) as comm:
        comm.barrier()
except Exception as error:
    print(type(error).__name__, error.ranks, flush=True)
"""
SENDS_NONE = 'struct.pack("II", 1, 3)'
# Does what rank 1 does at the start, up to a point.
DYING = """
import array, fcntl, os, socket, struct, sys, time
from tagi_ddp.communicators.equality import package_version
from tagi_ddp.communicators.shm import rendezvous_name
name = "\\0tagi_ddp/%d/%s" % (os.geteuid(), rendezvous_name(sys.argv[1] + "/0"))
for _ in range(1000):
    meeting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        meeting.connect(name)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
meeting.send(struct.pack("II40s", 1, 3, package_version().encode()))
point = int(sys.argv[2])
if point > 0:
    _, (memory,), *_ = socket.recv_fds(meeting, 4096, 1)
if point > 1:
    fcntl.lockf(memory, fcntl.LOCK_EX, 1, 1)
if point > 2:
    meeting.send(b"1")
if point > 3:
    meeting.recv(4096)
"""


def test_a_rank_of_a_version_that_sends_none_is_refused() -> None:
    """The others are refused for the same reason, also those that have not called yet."""
    job = secrets.token_hex(4)
    earlier = DYING.replace('struct.pack("II40s", 1, 3, package_version().encode())', SENDS_NONE)
    assert earlier != DYING
    scripts = [[RANK, "0", job], [RANK, "2", job], [earlier, job, "0"]]
    ranks = [
        subprocess.Popen([sys.executable, "-c", *script], stdout=subprocess.PIPE, text=True)
        for script in scripts
    ]
    try:
        found = [process.communicate(timeout=45)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert found == ["Mismatch (1,)\n"] * 2 + [""]


@pytest.mark.parametrize("point", range(5))
def test_a_rank_that_dies_at_the_start_is_named_at_once(point: int) -> None:
    job = secrets.token_hex(4)
    scripts = [[RANK, "0", job], [RANK, "2", job], [DYING, job, str(point)]]
    ranks = [
        subprocess.Popen([sys.executable, "-c", *script], stdout=subprocess.PIPE, text=True)
        for script in scripts
    ]
    try:
        found = [process.communicate(timeout=45)[0] for process in ranks]  # half of the limit
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert found == ["PeerLost (1,)\n"] * 2 + [""]
