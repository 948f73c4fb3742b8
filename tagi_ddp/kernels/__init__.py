"""Kernels for GPUs in Triton, which torch for CUDA includes.

In small networks the start of torch's operators takes most of the time, and one kernel replaces up
to a dozen of them. The rounding errors are those of float32.
"""

from __future__ import annotations

import functools
import warnings
from types import ModuleType

import torch
from torch import Tensor


def find(tensor: Tensor) -> ModuleType | None:
    """Return the module of kernels for float32 tensors on the device of ``tensor``.

    Returns None if torch's operators are to be used. Warns once if the reason is that Triton, or
    what it needs to compile, is missing.
    """
    return _on_gpu(tensor.device) if tensor.is_cuda and tensor.dtype == torch.float32 else None


_AMPERE = (8, 0)


@functools.cache
def _on_gpu(device: torch.device) -> ModuleType | None:
    try:
        if torch.cuda.get_device_capability(device) < _AMPERE:
            return None  # Its tensor cores have no TF32.
        from tagi_ddp.kernels import triton_kernels

        triton_kernels.try_out(device)
    except Exception as error:  # The types of Triton, compilers and drivers are not documented.
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            "Steps of small networks on the GPU take longer, as Triton does not work here: "
            f"{type(error).__name__}: {reason}. It needs torch's own triton and a C compiler.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return triton_kernels
