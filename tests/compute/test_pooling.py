"""Average and maximum pooling, inside of networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from compute.oracle import Both, compare


@dataclass
class Case:
    """One layer, and the sides of its square input and output."""

    kind: str
    side: int
    places: int
    kernel: int
    stride: int
    padding: int
    padding_type: int

    def make(self) -> Any:
        import pytagi.nn as nn

        return getattr(nn, self.kind)(self.kernel, self.stride, self.padding, self.padding_type)


# Not drawn, as the engine reads beyond its buffers or finds no maximum: padding where windows do
# not overlap (the kernel is the stride, or the input's side), windows that see nothing but
# padding, and average pooling with strides larger than the kernel or without one.
@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["AvgPool2d", "MaxPool2d"]))
    kernel = draw(st.integers(1, 5))
    stride = draw(st.integers(1, kernel + (kind == "MaxPool2d")))
    padding = draw(st.integers(0, kernel - 1))
    padding_type = draw(st.integers(1, 2)) if padding else draw(st.integers(0, 2))
    places = draw(st.integers(1, 6))
    side = (places - 1) * stride + kernel - padding * (2 if padding_type == 1 else 1)
    assume(side >= 1)
    if padding:
        assume(kernel != stride)
        assume(kernel != side)
        last = (places - 1) * stride - (padding if padding_type == 1 else 0)
        assume(last < side)
    return Case(kind, side, places, kernel, stride, padding, padding_type)


@settings(deadline=None)  # others may use the machine
@given(
    case=cases(),
    batch=st.integers(1, 5),
    channels=st.integers(1, 4),
    before=st.sampled_from(["ReLU", None]),
    after=st.sampled_from(["ReLU", "Linear", "Conv2d", None]),
    seed=st.integers(0, 2**31),
)
def test_pooling(
    case: Case, batch: int, channels: int, before: str | None, after: str | None, seed: int
) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        below = nn.Conv2d(2, channels, 1, in_width=case.side, in_height=case.side)
        rectifier = [nn.ReLU()] if before else []
        above: dict[str | None, Any] = {
            "ReLU": nn.ReLU,
            "Linear": lambda: nn.Linear(channels * case.places**2, 3),
            "Conv2d": lambda: nn.Conv2d(channels, 3, 1),
        }
        return [below, *rectifier, case.make(), *([above[after]()] if after else [])]

    compare(layers, 2 * case.side**2, batch, seed)


@pytest.mark.parametrize("kind", ["AvgPool2d", "MaxPool2d"])
def test_pool_of_pool(kind: str) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        pool = getattr(nn, kind)
        return [
            nn.Conv2d(1, 3, 3, in_width=13, in_height=13),
            nn.ReLU(),
            pool(3, 2),
            pool(2, 1),
            nn.Linear(3 * 4 * 4, 2),
        ]

    compare(layers, 13 * 13, 4)


@settings(deadline=None)  # others may use the machine
@given(case=cases(), seed=st.integers(0, 2**31))
def test_first_of_equal_means(case: Case, seed: int) -> None:
    """Variances tell which of the elements with the largest mean was chosen."""
    import pytagi.nn as nn

    both = Both(nn.Conv2d(1, 1, 1, in_width=case.side, in_height=case.side), case.make())
    rng = np.random.default_rng(seed)
    mean = rng.integers(0, 2, (2, case.side**2)).astype(np.float32)
    variance = rng.uniform(0.1, 1, mean.shape).astype(np.float32)
    innovation = rng.uniform(-1, 0, (2, 2 * case.places**2)).astype(np.float32)
    ours = both.torch(mean, variance, innovation)
    ours.assert_close(both.engine(mean, variance, innovation))


@pytest.mark.parametrize("side", [4, 7])
def test_whole_image_without_a_stride(side: int) -> None:
    def layers() -> list[Any]:
        import pytagi.nn as nn

        first = nn.Conv2d(2, 3, 3, padding=1, in_width=side, in_height=side)
        return [first, nn.ReLU(), nn.AvgPool2d(side), nn.Linear(3, 4)]

    compare(layers, 2 * side * side, 5)
