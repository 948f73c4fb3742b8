"""NCCL's and CUDA's libraries, opened when a communicator needs them, never before."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

from tagi_ddp._backend import Cuda, Device, Nccl
from tagi_ddp.communicators.errors import BackendUnavailable
from tagi_ddp.engine.loader import LIBNCCL, STUB, loaded_libraries, nccl_candidates
from tagi_ddp.environment import setting

_INSTALL = "pip install nvidia-nccl-cu12, or nvidia-nccl-cu13, as the driver's CUDA is 12 or 13"
_open_cuda, _open_nccl = functools.cache(Cuda), functools.cache(Nccl)


class NcclMissing(BackendUnavailable):
    """No usable NCCL was found; the driver and the GPU may work."""


def open_cuda() -> Cuda:
    """Return CUDA's driver library: TAGI_DDP_LIBCUDA if that is set, else the system's.

    Raises BackendUnavailable.
    """
    path = setting("LIBCUDA") or "libcuda.so.1"
    try:
        return _open_cuda(path)
    except RuntimeError as error:
        raise BackendUnavailable(
            f"CUDA cannot be used here: {error}. nccl needs NVIDIA's driver and a GPU; shm, mpi "
            "and gloo do not"
        ) from error


def open_nccl() -> Nccl:
    """Return NCCL's library, 2.18 or newer.

    That is the one that TAGI_DDP_LIBNCCL names, or else the first usable one of: the one that this
    process has loaded already; that of PyPI's wheels for CUDA 12 or 13; the system's.

    Raises NcclMissing.
    """
    # Connect all ranks in `init`, not in the first operation, which would wait for them.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    chosen = setting("LIBNCCL")
    if chosen == STUB:
        raise NcclMissing("TAGI_DDP_LIBNCCL is 'stub', so there is no NCCL; unset it")
    reasons = []
    for path in [chosen] if chosen else _candidates():
        try:
            return _open_nccl(path)
        except RuntimeError as error:
            if chosen or os.path.exists(path):
                reasons.append(str(error))
    why = "; ".join(reasons) or f"no {LIBNCCL} was found"
    raise NcclMissing(
        f"NCCL cannot be used here: {why}. {_INSTALL}, or set TAGI_DDP_LIBNCCL to its path"
    )


def local_device(local_rank: int) -> int:
    """Return the number of the device for a local rank; raise BackendUnavailable without CUDA.

    A launcher may show each rank a part of the host's devices, which CUDA then counts from 0, like
    ``srun --gpus-per-task=1`` or ``--gpu-bind=closest``: the local rank counts through those.
    """
    return local_rank % max(1, open_cuda().device_count)


def find_device(number: int) -> Device:
    """Return the CUDA device with this number; raise BackendUnavailable if there is none."""
    cuda = open_cuda()
    count = cuda.device_count
    if number >= count:
        raise BackendUnavailable(
            f"there is no cuda:{number}: CUDA shows {count} devices to this rank, counted from 0. "
            "Give device= one of these, or let the launcher bind more of them to a rank"
        )
    try:
        return Device(cuda, number)
    except RuntimeError as error:
        raise BackendUnavailable(f"cuda:{number} cannot be used: {error}") from error


def _candidates() -> Iterator[str]:
    loaded = loaded_libraries().get(LIBNCCL, STUB)
    if loaded != STUB:
        yield loaded
    yield from nccl_candidates()
