"""Convolutions and transposed convolutions, first and in the middle of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compute.oracle import compare


@dataclass
class Case:
    """One layer, and the side of its square input."""

    kind: str
    side: int
    inputs: int
    outputs: int
    kernel: int
    stride: int
    padding: int
    padding_type: int
    bias: bool

    def make(self, first: bool) -> Any:
        import pytagi.nn as nn

        side = self.side if first else 0
        return getattr(nn, self.kind)(
            self.inputs,
            self.outputs,
            self.kernel,
            self.bias,
            self.stride,
            self.padding,
            self.padding_type,
            in_width=side,
            in_height=side,
        )


# Not drawn, as the engine reads beyond its index tables: strides larger than the kernel,
# rectangular images, and transposed convolutions of images so small, or so padded, that no input
# sees its whole window or that a weight is never used with all inputs.
@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    kernel = draw(st.integers(1, 5))
    stride = draw(st.integers(1, kernel))
    padding, padding_type = draw(st.integers(0, kernel)), draw(st.integers(1, 2))
    places = draw(st.integers(1, 6))
    side = (places - 1) * stride + kernel - padding * (2 if padding_type == 1 else 1)
    assume(side >= 1)
    channels = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return Case(
        "Conv2d", side, *channels, kernel, stride, padding, padding_type, draw(st.booleans())
    )


@st.composite
def transposed_convolutions(draw: st.DrawFn) -> Case:
    kernel = draw(st.integers(1, 5))
    stride = draw(st.integers(1, kernel))
    padding_type = draw(st.integers(1, 2))
    sides = 2 if padding_type == 1 else 1
    padding = draw(st.integers(0, (kernel - 1) // sides))
    side = draw(st.integers(1, 4)) + sides * -(-padding // stride)
    channels = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return Case(
        "ConvTranspose2d",
        side,
        *channels,
        kernel,
        stride,
        padding,
        padding_type,
        draw(st.booleans()),
    )


CASES = convolutions() | transposed_convolutions()


@settings(deadline=None)  # others may use the machine
@given(case=CASES, batch=st.integers(1, 5), exact=st.booleans(), seed=st.integers(0, 2**31))
def test_first(case: Case, batch: int, exact: bool, seed: int) -> None:
    compare(lambda: [case.make(True)], case.inputs * case.side**2, batch, seed, exact)


@settings(deadline=None)  # others may use the machine
@given(
    case=CASES,
    batch=st.integers(1, 5),
    before=st.sampled_from(["ReLU", None]),
    after=st.sampled_from(["ReLU", "Linear", None]),
    exact=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_inside(
    case: Case, batch: int, before: str | None, after: str | None, exact: bool, seed: int
) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        below = nn.Conv2d(2, case.inputs, 1, in_width=case.side, in_height=case.side)
        rectifier = [nn.ReLU()] if before else []
        above: list[Any] = []
        if after == "ReLU":
            above = [nn.ReLU()]
        if after == "Linear":
            sides = case.padding * (2 if case.padding_type == 1 else 1)
            places = (case.side - case.kernel + sides) // case.stride + 1
            if case.kind == "ConvTranspose2d":
                places = (case.side - 1) * case.stride + case.kernel - sides
            above = [nn.ReLU(), nn.Linear(case.outputs * places**2, 3)]
        return [below, *rectifier, case.make(False), *above]

    compare(layers, 2 * case.side**2, batch, seed, exact)


def test_after_linear() -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        return [
            nn.Linear(6, 3 * 4 * 4),
            nn.ReLU(),
            nn.ConvTranspose2d(3, 2, 3, True, 2, 1, 2, in_width=4, in_height=4),
            nn.ReLU(),
            nn.Conv2d(2, 1, 3, padding=1),
        ]

    compare(layers, 6, 3)


@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
def test_padding_type_that_the_engine_does_not_define(kind: str) -> None:
    from tagi_ddp.engine.options import window_of

    case = Case(kind, 0, 1, 1, 3, 1, 1, 0, True)
    with pytest.raises(ValueError, match="use padding_type 1"):
        window_of(case.make(True)._cpp_backend)
