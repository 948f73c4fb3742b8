"""A process that a rank forks: it cannot use the rank's communicator, and does it no harm."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from contract.data import caught
from support.rank_pool import RankPool


def use_in_a_fork(comm: Any) -> str:
    """Return the error of a fork that uses ``comm`` in a block, which aborts and closes it."""
    comm.barrier()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            error = caught(lambda: sum_in_a_block(comm))
            os.write(writer, f"{type(error).__name__} {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    buffer = np.full(9, comm.rank + 1.0)
    comm.all_reduce(buffer)
    assert buffer.tolist() == [sum(range(comm.size + 1))] * 9
    return told


def sum_in_a_block(comm: Any) -> None:
    with comm:
        comm.all_reduce(np.full(9, 100.0))


class ForksContract:
    """At every number of ranks from 2 on; not on GPUs, as torch refuses CUDA in a fork."""

    def test_fork(self, pool: RankPool, size: int) -> None:
        for rank, text in enumerate(pool.run(use_in_a_fork, size=size)):
            assert text.startswith("CommunicatorError"), text
            assert f"rank {rank} of {size} ({pool.backend})" in text
            assert "fork" in text
