"""The memory format of tensors."""

from __future__ import annotations

import torch


def get_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """Return the memory format in which ``tensor`` is contiguous, else contiguous_format.

    A tensor that is contiguous in several, as those with a single channel are, is channels_last.
    """
    for memory_format in (torch.channels_last, torch.channels_last_3d):
        if tensor.is_contiguous(memory_format=memory_format):
            return memory_format
    return torch.contiguous_format
