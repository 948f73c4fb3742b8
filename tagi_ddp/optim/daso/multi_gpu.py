"""The module that `DASO` trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from tagi_ddp.optim.daso.optimizer import DASO
from tagi_ddp.optim.models import Wrapper, check_not_wrapped


class DataParallelMultiGPU(Wrapper):
    """A module that `DASO` trains on all ranks, on any number of GPUs, or none.

    Args:
        module: this rank's; its parameters and buffers become those of rank 0.
        optimizer: the DASO that trains it.
        comm: accepted for compatibility; the ranks are those of the optimizer.
    """

    def __init__(self, module: nn.Module, optimizer: DASO, comm: Any = None) -> None:
        """Pass the module to the optimizer; a collective call."""
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {module!r}")
        if not isinstance(optimizer, DASO):
            raise TypeError(f"optimizer must be a DASO, got {optimizer!r}")
        check_not_wrapped("module", module)
        super().__init__()
        self.module = module
        self._progress = optimizer.progress
        optimizer.set_model(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._progress()
        return self.module(*args, **kwargs)
