"""Kernels for GPUs in Triton, which comes with torch for CUDA.

Where networks are small, most of the time of torch's operators is their begin: a kernel does in one
what takes torch up to a dozen. All err no more than float32 does.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor


def find(tensor: Tensor) -> ModuleType | None:
    """Return the module of kernels for float32 tensors where this one lives.

    None where torch's operators do the same; with one warning if that is because Triton, or what it
    needs to compile, is missing.
    """
    return _on_gpu(tensor.device) if tensor.is_cuda and tensor.dtype == torch.float32 else None


_AMPERE = (8, 0)


@functools.cache
def _on_gpu(device: torch.device) -> ModuleType | None:
    try:
        if torch.cuda.get_device_capability(device) < _AMPERE:
            return None  # whose tensor cores know no TF32
        from tagi_ddp.kernels import triton_kernels

        triton_kernels.try_out(device)
    except Exception as error:  # of Triton, a compiler or the driver: kinds that nobody lists
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            "Steps of small networks on the GPU take longer, as Triton does not work here: "
            f"{type(error).__name__}: {reason}. It needs torch's own triton and a C compiler.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_kernels
