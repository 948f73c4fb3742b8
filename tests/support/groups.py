"""torch's process groups of the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def process_group(comm: Any) -> Iterator[Any]:
    """Give a block torch's default group, over gloo, of the ranks of ``comm``."""
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.size)
    try:
        yield dist.group.WORLD
        comm.barrier()  # rank 0 holds the store
    finally:
        dist.destroy_process_group()
    comm.barrier()  # the next group must not find this one's store
