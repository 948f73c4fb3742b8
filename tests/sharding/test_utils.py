"""The memory format of a tensor."""

from __future__ import annotations

import pytest
import torch

from tagi_ddp.sharding import get_memory_format

FORMATS = {
    torch.channels_last: (2, 3, 4, 5),
    torch.channels_last_3d: (2, 3, 4, 5, 6),
    torch.contiguous_format: (2, 3, 4, 5),
}


@pytest.mark.parametrize("memory_format", FORMATS)
def test_format_of_a_contiguous_tensor(memory_format: torch.memory_format) -> None:
    tensor = torch.empty(FORMATS[memory_format], memory_format=memory_format)
    assert get_memory_format(tensor) is memory_format


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5, 6, 7)])
def test_shapes_without_channels(shape: tuple[int, ...]) -> None:
    assert get_memory_format(torch.empty(shape)) is torch.contiguous_format


def test_not_contiguous() -> None:
    tensor = torch.empty(2, 3, 4, 5).transpose(0, 1)
    assert get_memory_format(tensor) is torch.contiguous_format


def test_single_channel() -> None:
    assert get_memory_format(torch.empty(2, 1, 4, 5)) is torch.channels_last
