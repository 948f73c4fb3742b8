"""The contract over torch.distributed's gloo, and how its ranks find each other."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.failures import FailuresContract
from contract.operations import OperationsContract
from contract.whole import WholeContract
from support.ipv6 import has_ipv6_loopback
from support.rank_pool import RankPool

from tagi_ddp.communicators import BackendUnavailable, PeerLost, Timeout, as_communicator, init
from tagi_ddp.launcher.launch import launch


@pytest.mark.ranks("gloo", 3)
class TestGloo(WholeContract):
    """On one host: through its memory."""


@pytest.mark.slow  # TestApart goes through gloo alone, too
@pytest.mark.ranks("gloo", 3, levels="0")
class TestFlat(OperationsContract, FailuresContract):
    """Through gloo alone."""


@pytest.mark.ranks("gloo", 3, hosts="abc")
class TestApart(WholeContract):
    """Each rank on an emulated host of its own."""


@pytest.mark.ranks("gloo", 3, hosts="aba")
class TestTwoLevels(WholeContract):
    """On emulated hosts, one with the first and the last rank."""


@pytest.mark.slow
@pytest.mark.ranks("gloo", 3, hosts="aab")
class TestOneAndTwo(WholeContract):
    """On a host with two ranks and one with one."""


@pytest.mark.slow
@pytest.mark.ranks("gloo", 4, hosts="aabb")
class TestTwoAndTwo(WholeContract):
    """On two hosts of two ranks each."""


@pytest.mark.slow
@pytest.mark.ranks("gloo", 4, hosts="abcc")
class TestThreeHosts(WholeContract):
    """On three hosts, the last one with two ranks."""


def threads_of_broken_groups(comm: Any, job: str) -> int:
    """Return how many threads of gloo are left of groups in which a rank failed."""
    before = threads_of_gloo()
    for number in range(3):
        group = init("gloo", comm.rank, comm.size, job=f"{job} {number}", timeout=20)
        if comm.rank == 1:
            group.abort("it is a test")
        else:
            with pytest.raises(PeerLost, match="it is a test"):
                group.barrier()
        group.close()
        comm.barrier()
    return threads_of_gloo() - before


def threads_of_gloo() -> int:
    return sum("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))


def test_broken_groups_leave_no_threads() -> None:
    with contextlib.closing(RankPool("shm", 2)) as pool:
        assert pool.run(threads_of_broken_groups, "broken") == [0, 0]


def beside_process_groups(comm: Any, job: str) -> None:
    """Default process groups at the same address, before and after ours, stay as they were."""
    import torch
    import torch.distributed as dist

    settings = {"rank": comm.rank, "world_size": comm.size, "job": job, "timeout": 20}
    for _ in range(2):
        with init("gloo", **settings) as second:
            second.barrier()
        dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
        try:
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            with init("gloo", **settings) as second:
                second.all_reduce(tensor)
                dist.all_reduce(tensor)
            assert tensor.tolist() == [comm.size**3] * 3
        finally:
            dist.destroy_process_group()
        comm.barrier()  # the next default group must not find this one's store


def wrapped(comm: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    try:
        with as_communicator(dist.group.WORLD) as whole:
            buffer = np.ones(3)
            whole.all_reduce(buffer)
            assert (whole.backend, whole.rank, whole.size) == ("gloo", comm.rank, comm.size)
            assert buffer[0] == comm.size
            assert as_communicator(whole) is whole
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor == comm.size
        # All but rank 0, in the order of a group of its own; twice, each with its connections.
        group = dist.new_group(list(range(1, comm.size)))
        if comm.rank > 0:
            with as_communicator(group) as one, as_communicator(group) as two:
                assert (one.rank, one.size) == (comm.rank - 1, comm.size - 1)
                works = [c.all_reduce(buffer[:1].copy(), async_op=True) for c in (two, one)]
                for work in works:
                    work.wait()
        comm.barrier()  # rank 0 holds the store
    finally:
        dist.destroy_process_group()


def without_address(comm: Any, name: str, value: str | None) -> str:
    saved = os.environ.pop(name)
    if value is not None:
        os.environ[name] = value
    try:
        init("gloo", rank=comm.rank, world_size=comm.size, timeout=0.5)
    except (BackendUnavailable, Timeout) as error:
        return f"{type(error).__name__} {error}"
    finally:
        os.environ[name] = saved
    raise AssertionError("no error")


@pytest.mark.slow  # torch is imported in each rank
def test_a_fork_may_end_as_any_process_does() -> None:
    def fork() -> None:
        with init("gloo", timeout=20) as comm:
            comm.all_reduce(np.ones(3))
            pid = os.fork()
            if pid == 0:
                sys.exit(4)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4
            comm.all_reduce(np.ones(3))

    launch(fork, 2, timeout=60)


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope0")
    with pytest.raises(BackendUnavailable, match=r"GLOO_SOCKET_IFNAME is lo,nope0, .* are lo"):
        init("gloo", 0, 2, job="no interface", timeout=5)


def in_a_slurm_step(comm: Any) -> str:
    """Ranks that srun has started find each other by its variables."""
    saved = {name: os.environ.pop(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    step = {
        "SLURM_JOB_ID": saved["MASTER_PORT"],
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(comm.rank),
        "SLURM_STEP_NUM_TASKS": str(comm.size),
        "SLURM_LOCALID": str(comm.rank),
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": str(comm.size),
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }
    os.environ.update(step)
    try:
        with init("gloo", timeout=20) as second:
            buffer = np.ones(3)
            second.all_reduce(buffer)
            return f"{second.rank} {buffer[0]}"
    finally:
        for name in step:
            del os.environ[name]
        os.environ.update(saved)


def over_ipv6(comm: Any, job: str) -> list[float]:
    """Ranks that see no address of each other but one of IPv6."""
    from tagi_ddp.communicators import topology
    from tagi_ddp.communicators.control import mesh

    mesh._addresses = lambda: ["::1"]
    mesh.host_id = topology.host_id = lambda: f"host of {comm.rank}"
    with init("gloo", rank=comm.rank, world_size=comm.size, job=job, timeout=20) as second:
        assert second._channel.address == "::1"
        buffer, part = np.ones(3), second.split(0)
        part.all_reduce(buffer)
        part.close()
    return buffer.tolist()


def read_only_input(comm: Any) -> None:
    buffer = np.ones(4)
    buffer.flags.writeable = False
    out = np.empty(4)
    comm.all_reduce(buffer, out=out)
    assert out.tolist() == [comm.size] * 4


@pytest.mark.ranks("gloo", 4)
class TestTogether:
    """Beside torch's own groups, at any address, on one host."""

    @pytest.mark.parametrize("members", [2, 4])
    def test_beside_process_groups(self, pool: RankPool, members: int) -> None:
        pool.run(beside_process_groups, f"beside {members}", size=members)

    def test_wrapped_process_group(self, pool: RankPool) -> None:
        pool.run(wrapped, size=3)

    @pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
    def test_no_address(self, pool: RankPool, name: str) -> None:
        for text in pool.run(without_address, name, None, size=2):
            assert "BackendUnavailable" in text
            assert "MASTER_ADDR" in text
            assert "torchrun" in text

    def test_in_a_slurm_step(self, pool: RankPool) -> None:
        assert pool.run(in_a_slurm_step, size=2) == ["0 2.0", "1 2.0"]

    @pytest.mark.skipif(not has_ipv6_loopback(), reason="no IPv6")
    def test_over_ipv6(self, doomed: RankPool, size: int) -> None:
        assert doomed.run(over_ipv6, "IPv6") == [[size] * 3] * size

    def test_nobody_at_the_address(self, pool: RankPool) -> None:
        for text in pool.run(without_address, "MASTER_ADDR", "192.0.2.1", size=2)[1:]:
            assert "Timeout" in text
            assert "192.0.2.1" in text

    def test_read_only_input(self, pool: RankPool) -> None:
        pool.run(read_only_input, size=2)
