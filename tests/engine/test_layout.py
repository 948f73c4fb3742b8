"""The search for the layout of an engine's layers, on stand-ins whose memory is shifted.

The stand-in is a layer in Python with memory of its own, which setters and `step` write. `make
sanitize` runs these tests, so that a read outside of it ends the process.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.raw_memory import Memory

from tagi_ddp.engine import layout
from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.layout import Layout, find_layout
from tagi_ddp.engine.pointers import LayoutError

NAMES = PARAMETERS + DELTAS
BEYOND = 64  # bytes of a derived class


class Engine:
    """A stand-in for cutagi whose layers have their fields at the offsets of ``found``.

    ``noise`` fills the bytes between. ``counts`` False: a step counts no corrected variances.
    """

    def __init__(self, found: Layout, noise: int = 0, counts: bool = True) -> None:
        engine, memory = self, Memory()
        self.layout, self.addresses = found, {}

        class Linear:
            def __init__(self, *_: Any) -> None:
                data = bytearray([noise]) * (found.end + BEYOND)
                data[found.end - 32 :] = bytes(32 + BEYOND)
                address = memory.store(bytes(data))
                text = struct.pack("2Q", address + found.end - 16, 3) + b"cpu\0"
                ctypes.memmove(address + found.end - 32, text, len(text))
                engine.addresses[id(self)] = address
                for name in NAMES:
                    setattr(self, name, [])

            def __setattr__(self, name: str, value: Any) -> None:
                if name not in NAMES:
                    object.__setattr__(self, name, value)
                    return
                data = np.array(value, np.float32).tobytes()
                begin = memory.store(data) if data else 0
                vector = struct.pack("3Q", begin, begin + len(data), begin + len(data))
                at = engine.addresses[id(self)] + found.vectors + 24 * NAMES.index(name)
                ctypes.memmove(at, vector, 24)

            def __getattr__(self, name: str) -> list[float]:
                at = engine.addresses[id(self)] + found.vectors + 24 * NAMES.index(name)
                begin, end, _ = struct.unpack("3Q", ctypes.string_at(at, 24))
                data = ctypes.string_at(begin, end - begin) if begin else b""
                return np.frombuffer(data, np.float32).tolist()

        class Sequential:
            def __init__(self, layers: list[Any]) -> None:
                self._layer, self._count = layers[0], 0

            def step(self) -> None:
                if counts:
                    self._count = sum(delta < 0 for delta in self._layer.delta_var_w)
                at = engine.addresses[id(self._layer)] + found.counter
                ctypes.memmove(at, struct.pack("i", self._count), 4)

            def get_neg_var_w_counter(self) -> dict[str, int]:
                return {"Linear": self._count}

        self.Linear, self.Sequential = Linear, Sequential

    def address_of(self, layer: Any) -> int:
        return self.addresses[id(layer)]


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that searches the layout of an engine."""

    def found(engine: Engine) -> Layout:
        monkeypatch.setitem(sys.modules, "cutagi", engine)  # type: ignore[arg-type]
        monkeypatch.setattr(layout, "load_engine", lambda: SimpleNamespace())
        monkeypatch.setattr(layout, "address_of", engine.address_of)
        find_layout.cache_clear()
        return find_layout()

    yield found
    find_layout.cache_clear()


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    before=st.integers(0, 30),
    counter=st.integers(0, 20),
    after=st.integers(0, 30),
    noise=st.sampled_from([0, 1, 255]),
)
def test_any_layout_is_found(
    search: Any, before: int, counter: int, after: int, noise: int
) -> None:
    vectors = 96 + 8 * before
    expected = Layout(vectors, 8 + 4 * counter, vectors + 8 * 24 + 8 * after + 32)
    assert search(Engine(expected, noise)) == expected


def test_what_is_not_found_is_named(search: Any) -> None:
    ordinary = Layout(104, 96, 344)
    with pytest.raises(LayoutError, match="does not count the variances"):
        search(Engine(ordinary, counts=False))
    engine = Engine(ordinary)
    engine.address_of = lambda layer: engine.addresses[id(layer)] + 104 + 8  # type: ignore[method-assign]
    with pytest.raises(LayoutError, match="vectors of a layer: found at 0 places"):
        search(engine)


def test_memory_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="Input/output error"):
        layout.read_memory(0, 8)
