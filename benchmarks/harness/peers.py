"""The alternatives that may not be installed: mpi4py, torch's gloo, anemoi-models."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

from benchmarks.harness.measure import Missing
from tagi_ddp import Communicator


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
    store = dist.FileStore(str(scratch / "gloo"), communicator.size)
    dist.init_process_group(
        "gloo", store=store, rank=communicator.rank, world_size=communicator.size
    )
    return dist


def find_anemoi() -> Any | Missing:
    """Return the module anemoi.models.distributed."""
    try:
        return importlib.import_module("anemoi.models.distributed")
    except ModuleNotFoundError:
        return Missing("no anemoi-models; with Python 3.11 or later: pip install '.[bench]'")
