"""Memory of another layout is refused, and nothing is read of what only seems to be a vector.

The layer is a stand-in: memory like that of the engine's layer, with bytes inserted somewhere.
`make sanitize` runs these tests, so that a read outside of it ends the process.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytagi.nn import Linear, Sequential
from support.raw_memory import Memory

from tagi_ddp import accelerate
from tagi_ddp.engine import layers as engine_layers
from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.layout import Layout, check_layer
from tagi_ddp.engine.pointers import LayoutError

SIZE, VECTORS = 344, 104


class StandIn:
    """A layer of 3 x 2 weights whose memory is its own, with ``more`` bytes from ``place`` on."""

    def __init__(self, place: int, more: bytes, scalar: int) -> None:
        self._memory = Memory()
        names = PARAMETERS + DELTAS
        sizes = {name: 6 if name.endswith("_w") else 2 for name in names}
        for number, name in enumerate(names):
            setattr(self, name, [float(number)] * sizes[name])
        self.num_weights = 6
        memory = bytearray(SIZE)
        memory[8:88] = struct.pack("10Q", *[scalar] * 10)
        for number, name in enumerate(names):
            values = np.array(getattr(self, name), np.float32).tobytes()
            begin = self._memory.store(values)
            ends = begin, begin + len(values), begin + len(values)
            memory[VECTORS + 24 * number : VECTORS + 24 * number + 24] = struct.pack("3Q", *ends)
        memory[place:place] = more
        self.address = self._memory.store(bytes(memory))


def refused(place: int, more: bytes, scalar: int = 5) -> bool:
    layer = StandIn(place, more, scalar)
    try:
        check_layer(layer, layer.address, Layout(VECTORS, 96, SIZE))
    except LayoutError:
        return True
    return False


def test_the_own_layout_is_known() -> None:
    assert not refused(SIZE, b"")


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([8, 88, 92, 104, 128, 200]),
    st.integers(1, 64),
    st.sampled_from([b"\0", b"\1", b"\xff"]),
    st.sampled_from([0, 5, 6]),
)
def test_any_other_layout_is_refused(place: int, count: int, fill: bytes, scalar: int) -> None:
    assert refused(place, fill * count, scalar)


def test_parameters_that_are_elsewhere_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of a layer is its class's name in the engine; here a known one is forgotten."""
    network = Sequential(Linear(3, 4), Linear(4, 1))
    monkeypatch.setattr(engine_layers, "_KNOWN", ())
    accelerate(network).close()
    shown = network.state_dict()

    def with_more(self: Any) -> Any:
        return {**shown, "MultiheadAttentionV2.1": ([0.0] * 8, [1.0] * 8, [], [])}

    monkeypatch.setattr(Sequential, "state_dict", with_more)
    with pytest.raises(ValueError, match="shows 58 parameters, but its layers hold 42 where"):
        accelerate(network)
