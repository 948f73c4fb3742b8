"""The networks of the benchmarks, and the proof that two of them did the same work."""

from __future__ import annotations

import numpy as np
import pytagi
from pytagi.nn import (
    AvgPool2d,
    BatchNorm2d,
    Conv2d,
    LayerBlock,
    Linear,
    MixtureReLU,
    ReLU,
    ResNetBlock,
    Sequential,
)

from tagi_ddp import DDPSequential

INPUTS = 784
FEATURES = 13
OUTPUTS = 11


def mlp(hidden: int) -> Sequential:
    """Return 784-hidden-hidden-11, with the same parameters at every call."""
    pytagi.manual_seed(0)
    return Sequential(
        Linear(INPUTS, hidden), ReLU(), Linear(hidden, hidden), ReLU(), Linear(hidden, OUTPUTS)
    )


def small(hidden: int) -> Sequential:
    """Return 13-hidden-11, as for a table of data, with the same parameters at every call."""
    pytagi.manual_seed(0)
    return Sequential(Linear(FEATURES, hidden), ReLU(), Linear(hidden, OUTPUTS))


def cnn(channels: int) -> Sequential:
    """Return two convolutions and two linear layers, for 28x28, with the same parameters always."""
    pytagi.manual_seed(0)
    return _initialised(
        Conv2d(1, channels, 5, padding=2, in_width=28, in_height=28),
        ReLU(),
        AvgPool2d(2, 2),
        Conv2d(channels, 2 * channels, 5, padding=2),
        ReLU(),
        AvgPool2d(2, 2),
        Linear(2 * channels * 7 * 7, 100),
        ReLU(),
        Linear(100, OUTPUTS),
    )


def resnet18(channels: int) -> Sequential:
    """Return a ResNet-18 for 32x32 in color, with the same parameters at every call.

    Activations come before normalizations, and shortcuts have kernels of 2 x 2, as in pytagi's
    examples.
    """
    pytagi.manual_seed(0)
    layers = [Conv2d(3, channels, 3, bias=False, padding=1, in_width=32, in_height=32)]
    layers += [MixtureReLU(), BatchNorm2d(channels), *_stage(channels, channels)]
    for factor in (2, 4, 8):
        layers += _stage(factor * channels // 2, factor * channels)
    return _initialised(*layers, AvgPool2d(4, 4), Linear(8 * channels, OUTPUTS))


def _stage(before: int, after: int) -> list[ResNetBlock]:
    if before == after:
        first = ResNetBlock(LayerBlock(*_main(after, after)))
    else:
        shortcut = Conv2d(before, after, 2, bias=False, stride=2)
        first = ResNetBlock(
            LayerBlock(*_main(before, after, stride=2, padding_type=2)),
            LayerBlock(shortcut, MixtureReLU(), BatchNorm2d(after)),
        )
    return [first, ResNetBlock(LayerBlock(*_main(after, after)))]


def _main(before: int, after: int, **options: int) -> list:
    first = Conv2d(before, after, 3, bias=False, padding=1, **options)
    second = Conv2d(after, after, 3, bias=False, padding=1)
    return [first, MixtureReLU(), BatchNorm2d(after), second, MixtureReLU(), BatchNorm2d(after)]


def _initialised(*layers: object) -> Sequential:
    """Return the network with its parameters, which convolutions else get at their first batch."""
    model = Sequential(*layers)
    model.preinit_layer()
    return model


Model = Sequential | DDPSequential


def require_equal(one: Model, other: Model, start: Model) -> None:
    """Raise unless both have moved from ``start``'s parameters alike: to 1e-3 of the way."""
    mine, theirs, before = map(_parameters, (one, other, start))
    for name, value in theirs.items():
        way = np.linalg.norm(value - before[name])
        rounding = 1e-6 * np.linalg.norm(value)
        if np.linalg.norm(mine[name] - value) > 1e-3 * way + rounding:
            raise RuntimeError(f"{name} differs; not the same work")


def _parameters(model: Model) -> dict[str, np.ndarray]:
    return {
        f"{layer} {name}": np.array(values, np.float32)
        for layer, parts in model.state_dict().items()
        for name, values in zip(("mu_w", "var_w", "mu_b", "var_b"), parts, strict=True)
    }
