"""torch's default group in a process that outlives it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@contextlib.contextmanager
def torch_group(comm: Any, path: str, backend: str = "tagi_ddp") -> Iterator[None]:
    """Initialise the default group of a pool's ranks; destroy it at the end."""
    import tagi_ddp.parallel  # noqa: F401  (registers)

    dist.init_process_group(backend, f"file://{path}", rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_equal_on_all(comm: Any, tensors: list[Tensor]) -> None:
    """Fail unless all ranks have the same bits."""
    for tensor in tensors:
        other = tensor.detach().clone()
        comm.broadcast(other.view(-1).view(torch.uint8), 0)
        assert torch.equal(other, tensor)
