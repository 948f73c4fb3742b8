"""The module that `DASO` trains."""

from __future__ import annotations

from typing import Any

from torch import nn

from tagi_ddp.optim.daso.optimizer import DASO
from tagi_ddp.optim.wrapped import Wrapper, check_not_wrapped


class DataParallelMultiGPU(Wrapper):
    """A module whose ranks are kept in step by `DASO`, on any number of GPUs, or none.

    Args:
        module: this rank's; its parameters and buffers become those of rank 0.
        daso: the optimizer, which takes charge of them.
    """

    def __init__(self, module: nn.Module, daso: DASO) -> None:
        """Give the module to the optimizer; a collective call."""
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {module!r}")
        if not isinstance(daso, DASO):
            raise TypeError(f"daso must be a DASO, got {daso!r}")
        check_not_wrapped("module", module)
        super().__init__()
        self.module = module
        self._progress = daso.progress
        daso.set_model(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        self._progress()
        return self.module(*args, **kwargs)
