"""Layers whose sizes do not fit each other, or that tell none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytagi.nn import (
    LSTM,
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    Embedding,
    LayerBlock,
    LayerNorm,
    Linear,
    ReLU,
    Sequential,
)
from support.engines import require_single_rows

from tagi_ddp import accelerate


def image(channels: int) -> Any:
    return Conv2d(1, channels, 3, padding=1, in_width=6, in_height=6)


# Networks, their inputs, and the sizes that do not fit: what a layer takes, and gets.
MISFITS: dict[str, tuple[Callable[[], list[Any]], int, int, int]] = {
    "linear": (lambda: [Linear(6, 16), ReLU(), Linear(8, 4)], 6, 8, 16),
    "image": (lambda: [image(2), ReLU(), Linear(12, 4)], 36, 12, 72),
    "channels": (lambda: [image(2), Conv2d(1, 2, 3, padding=1), Linear(72, 4)], 36, 36, 72),
    "layer norm": (lambda: [Linear(6, 8), LayerNorm([4]), Linear(8, 4)], 6, 4, 8),
    "series": (lambda: [LSTM(2, 4, seq_len=3), Linear(4, 4)], 6, 4, 12),
    "two series": (lambda: [LSTM(2, 4, seq_len=3), LSTM(4, 4, seq_len=2), Linear(8, 4)], 6, 8, 12),
    "embedding": (lambda: [Embedding(5, 3, 6), Linear(9, 4)], 6, 9, 18),
}


FIRST: dict[str, Callable[[], Any]] = {
    "relu": ReLU,
    "pool": lambda: AvgPool2d(2, 2),
    "batch norm": lambda: BatchNorm2d(4),
    "embedding": lambda: Embedding(5, 2),
    "convolution": lambda: Conv2d(1, 2, 2),
    "block": lambda: LayerBlock(ReLU(), Linear(4, 4)),
}


@pytest.mark.parametrize("compute", ["torch", "auto"])
@pytest.mark.parametrize("name", MISFITS)
def test_layers_that_do_not_fit(name: str, compute: Any) -> None:
    if name in ("series", "two series", "embedding"):
        require_single_rows()
    layers, inputs, takes, gets = MISFITS[name]
    text = f"a layer takes {takes} inputs, but the one before has {gets} outputs"
    with pytest.raises(ValueError, match=text):
        accelerate(Sequential(*layers()), compute)(np.zeros((8, inputs), np.float32))


@pytest.mark.parametrize("compute", ["engine", "native", "torch", "auto"])
@pytest.mark.parametrize("first", FIRST)
def test_the_first_layer_tells_the_size_of_inputs(first: str, compute: Any) -> None:
    with pytest.raises(ValueError, match=r"layer 0.* does not define the size of the network's"):
        accelerate(Sequential(FIRST[first](), Linear(4, 2)), compute)


def test_the_engine_begins_with_no_block() -> None:
    layers = [LayerBlock(Linear(4, 3), ReLU(), Linear(3, 4)), Linear(4, 2)]
    with pytest.raises(ValueError, match="begins with a LayerBlock"):
        accelerate(Sequential(*layers), "engine")
    assert len(accelerate(Sequential(*layers))(np.zeros((3, 4), np.float32))[0]) == 6
