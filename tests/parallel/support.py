"""Helpers that tests of several files use in a pool's processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def torch_group(comm: Any, path: str, backend: str = "tagi_ddp") -> Iterator[Any]:
    """Initialise the default group of a pool's ranks, and give it; destroy it at the end."""
    import tagi_ddp.parallel  # noqa: F401  (registers)

    dist.init_process_group(backend, f"file://{path}", rank=comm.rank, world_size=comm.size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def assert_equal_on_all(comm: Any, tensors: list[Tensor]) -> None:
    """Fail unless all ranks have the same bits."""
    for tensor in tensors:
        other = tensor.detach().clone()
        comm.broadcast(other.view(-1).view(torch.uint8), 0)
        assert torch.equal(other, tensor)


def flat(state: dict[str, Any]) -> Any:
    return np.concatenate([np.ravel(part) for name in sorted(state) for part in state[name]])


@contextlib.contextmanager
def launched(rank: int, size: int, job: str) -> Iterator[None]:
    """Set the variables of a launcher."""
    values = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    names = {f"TAGI_DDP_{name}": str(value) for name, value in values.items()}
    os.environ.update(names, TAGI_DDP_JOB=job)
    try:
        yield
    finally:
        for name in (*names, "TAGI_DDP_JOB"):
            del os.environ[name]
