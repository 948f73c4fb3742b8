"""Linear layers, alone and in a row."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compute.oracle import compare
from tagi_ddp.compute import linear


@given(
    inputs=st.integers(1, 40),
    hidden=st.integers(1, 40),
    outputs=st.integers(1, 12),
    batch=st.integers(1, 20),
    bias=st.booleans(),
    exact=st.booleans(),
    large=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_linear(
    inputs: int,
    hidden: int,
    outputs: int,
    batch: int,
    bias: bool,
    exact: bool,
    large: bool,
    seed: int,
) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        return [nn.Linear(inputs, hidden, bias), nn.ReLU(), nn.Linear(hidden, outputs, bias)]

    with pytest.MonkeyPatch.context() as patch:
        if large:  # multiplied as large matrices are
            patch.setattr(linear, "_LARGE", 0)
        compare(layers, inputs, batch, seed, exact)


@pytest.mark.parametrize("last", ["Linear", "ReLU"])
def test_last_layer(last: str) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        return [nn.Linear(5, 7), *([nn.ReLU()] if last == "ReLU" else [])]

    compare(layers, 5, 3)
