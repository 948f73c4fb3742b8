"""Random networks of image layers, over all sizes that the engine takes, 1 included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compute.oracle import Both, compare

Draw = Callable[[int], int]  # a number from 0 up to, not including, this one
Layer = tuple[str, tuple[Any, ...]]
ACTIVATIONS = ["MixtureReLU", "Tanh", "Sigmoid", "MixtureTanh"]
KINDS = ["Conv2d", *2 * ["ConvTranspose2d"], *3 * ["MaxPool2d"], "AvgPool2d"]
TOLERANCE = 1e-2  # several layers, of which each rounds
LARGEST = 40  # values of an image, as the engine is slow


# The engine reads beyond its tables in the cases that test_convolution.py and test_pooling.py tell;
# those are not drawn here either.
def convolution(draw: Draw, side: int) -> tuple[int, tuple[int, ...]] | None:
    """Return the side of the output, and (kernel, stride, padding, padding_type)."""
    kernel = 1 + draw(4)
    stride, padding, kind = 1 + draw(kernel), draw(kernel), 1 + draw(2)
    last = side + padding * (3 - kind) - kernel
    if last < 0 or last % stride:
        return None
    return last // stride + 1, (kernel, stride, padding, kind)


def transposed(draw: Draw, side: int) -> tuple[int, tuple[int, ...]] | None:
    kernel = 1 + draw(4)
    stride, kind = 1 + draw(kernel), 1 + draw(2)
    padding = draw((kernel - 1) // (3 - kind) + 1)
    if side <= (3 - kind) * -(-padding // stride):
        return None
    return (side - 1) * stride + kernel - padding * (3 - kind), (kernel, stride, padding, kind)


def pooling(draw: Draw, side: int, largest: bool) -> tuple[int, tuple[int, ...]] | None:
    if draw(3):
        return 1, (side, 1 + draw(side), 0, 1)  # to a single pixel
    kernel = 1 + draw(4)
    stride, padding, kind = 1 + draw(kernel + largest), draw(kernel), 1 + draw(2)
    last = side + padding * (3 - kind) - kernel
    beyond = last - (padding if kind == 1 else 0) >= side
    if last < 0 or last % stride or (padding and (kernel in (stride, side) or beyond)):
        return None
    return last // stride + 1, (kernel, stride, padding, kind)


def network(draw: Draw) -> tuple[list[Layer], int]:
    """Return the layers, as names and arguments, and the number of inputs."""
    side, channels = 1 + draw(6), 1 + draw(3)
    inputs = side * side * channels
    layers: list[Layer] = []
    for _ in range(2 + draw(4)):
        kind = KINDS[draw(len(KINDS))] if layers else "Conv2d"
        window = None
        for _ in range(50):
            if kind.startswith("Conv"):
                window = (convolution if kind == "Conv2d" else transposed)(draw, side)
            else:
                window = pooling(draw, side, kind == "MaxPool2d")
            if window is not None and window[0] <= LARGEST // 4:
                break
            window = None
        if window is None:
            continue
        new_side, (kernel, stride, padding, padding_type) = window
        if kind.startswith("Conv"):
            more = {"in_width": side, "in_height": side} if not layers else {}
            new_channels = 1 + draw(3)
            bias = bool(draw(2))
            arguments = channels, new_channels, kernel, bias, stride, padding, padding_type
            layers.append((kind, (*arguments, more)))
            channels = new_channels
        else:
            layers.append((kind, (kernel, stride, padding, padding_type, {})))
        side = new_side
        if draw(5) == 0:
            layers.append(("BatchNorm2d", (channels, {})))
        if draw(3):
            layers.append((ACTIVATIONS[draw(len(ACTIVATIONS))], ({},)))
    if draw(3):
        layers.append(("Linear", (side * side * channels, 1 + draw(3), {})))
    return layers, inputs


def compare_forward(make: Callable[[], list[Any]], inputs: int, batch: int, rng: Any) -> None:
    """Compare outputs, and the deltas of a batch with those of its samples.

    The engine's MaxPool2d leaves what an earlier layer has written in elements that it has not
    chosen, so that its innovations below are wrong in deep networks.
    """
    both = Both(*make())
    mean = rng.standard_normal((batch, inputs)).astype(np.float32)
    both.model.eval()
    ours = both.torch(mean, None, None)
    theirs = both.engine(mean, None, None)
    for results in (ours, theirs):
        del results.arrays["outputs' jacobians"]
    ours.assert_close(theirs, TOLERANCE)
    size = theirs.arrays["outputs' means"].size // batch
    innovation = np.stack([rng.standard_normal(batch * size), -rng.uniform(0.01, 1, batch * size)])
    whole = both.torch(mean, None, innovation.astype(np.float32)).arrays
    if any(layer.kind == "BatchNorm2d" for layer in both.replica.layers):
        return  # a sample alone has other statistics
    parts = [
        both.torch(
            mean[b : b + 1], None, innovation[:, b * size : (b + 1) * size].astype(np.float32)
        ).arrays
        for b in range(batch)
    ]
    for name in (name for name in whole if "delta" in name):
        total = np.sum([part[name] for part in parts], axis=0)
        distance = np.linalg.norm(whole[name] - total)
        assert distance <= TOLERANCE * np.linalg.norm(total) + 1e-12, name


def check(seed: int) -> None:
    import pytagi.nn as nn

    rng = np.random.default_rng(seed)
    layers, inputs = network(lambda high: int(rng.integers(high)))
    if not layers:
        return

    def make() -> list[Any]:
        return [getattr(nn, name)(*arguments[:-1], **arguments[-1]) for name, arguments in layers]

    try:
        if any(name == "MaxPool2d" for name, _ in layers):
            compare_forward(make, inputs, 2 + seed % 4, rng)
        else:
            compare(make, inputs, 2 + seed % 4, seed, bool(seed % 2), TOLERANCE)
    except (AssertionError, RuntimeError) as error:
        raise AssertionError(f"seed {seed}: {layers}: {error}") from error


def test_random_networks() -> None:
    for seed in range(100):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 6000, 1000))
def test_many_random_networks(first: int) -> None:
    for seed in range(first, first + 1000):
        check(seed)
