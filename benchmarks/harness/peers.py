"""The alternatives that may not be there: mpi4py, torch's gloo and NCCL, anemoi-models."""

from __future__ import annotations

import importlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.measure import Missing
from tagi_ddp import Communicator
from tagi_ddp.communicators import all_gather_object

if TYPE_CHECKING:
    import torch

_stores = itertools.count()


def open_mpi() -> Any | Missing:
    """Return mpi4py's module MPI, ready for use by all ranks."""
    if "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return Missing("Open MPI's mpirun is not installed")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return Missing("mpi4py is not installed")
    return MPI


def open_gloo(communicator: Communicator, scratch: Path) -> Any | Missing:
    """Return the module torch.distributed, its default group being all ranks over gloo."""
    try:
        import torch.distributed as dist
    except ImportError:
        return Missing("torch is not installed")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A file of its own: ranks of the group before may still be leaving theirs.
    store = dist.FileStore(str(scratch / f"gloo-{next(_stores)}"), communicator.size)
    dist.init_process_group(
        "gloo", store=store, rank=communicator.rank, world_size=communicator.size
    )
    return dist


def open_torch_nccl(
    communicator: Communicator, scratch: Path, device: torch.device
) -> Any | Missing:
    """Return the module torch.distributed, its default group being all ranks over its NCCL."""
    import torch
    import torch.distributed as dist

    if device.type != "cuda" or not dist.is_nccl_available():
        return Missing("torch has no NCCL here")
    torch.cuda.set_device(device)
    store = dist.FileStore(str(scratch / "nccl"), communicator.size)
    reason = ""
    try:
        dist.init_process_group(
            "nccl",
            store=store,
            rank=communicator.rank,
            world_size=communicator.size,
            device_id=device,  # else the first operation makes the group, and is what is measured
        )
    except RuntimeError as error:  # ranks on one GPU may be too much for it
        reason = f"torch's NCCL fails: {str(error).strip().splitlines()[-1]}"
    reasons = all_gather_object(communicator, reason)
    return Missing(next(filter(None, reasons))) if any(reasons) else dist


def find_anemoi() -> Any | Missing:
    """Return the module anemoi.models.distributed."""
    try:
        return importlib.import_module("anemoi.models.distributed")
    except ModuleNotFoundError:
        return Missing("no anemoi-models; with Python 3.11 or later: pip install '.[bench]'")
