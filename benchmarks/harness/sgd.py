"""The baseline of torch: the benchmarks' networks as torch.nn modules, trained by SGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.harness.networks import FEATURES, INPUTS, OUTPUTS


def mlp(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, OUTPUTS),
    )


def small(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, OUTPUTS))


def cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, channels, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(channels, 2 * channels, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 7 * 7, 100),
        nn.ReLU(),
        nn.Linear(100, OUTPUTS),
    )


def resnet18(channels: int) -> nn.Module:
    """Return a ResNet-18. It pads all sides where pytagi's pads right and bottom: as many sums."""
    blocks = [_Block(channels, channels), _Block(channels, channels)]
    for factor in (2, 4, 8):
        after = factor * channels
        blocks += [_Block(after // 2, after), _Block(after, after)]
    return nn.Sequential(
        nn.Unflatten(1, (3, 32, 32)),
        *_convolution(3, channels, 3, padding=1),
        *blocks,
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(8 * channels, OUTPUTS),
    )


class _Block(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.main = nn.Sequential(
            *_convolution(before, after, 3, padding=1, stride=stride),
            *_convolution(after, after, 3, padding=1),
        )
        self.shortcut = nn.Sequential(*_convolution(before, after, 2, stride=2) * (stride == 2))

    def forward(self, images: Tensor) -> Tensor:
        return self.main(images) + self.shortcut(images)


def _convolution(before: int, after: int, kernel: int, **options: int) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, kernel, bias=False, **options)
    return [convolution, nn.ReLU(), nn.BatchNorm2d(after)]


def trainer(model: nn.Module, samples: Tensor, labels: Tensor) -> Callable[[], None]:
    """Return a training step on samples, [batch, inputs]."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(samples), labels).backward()
        optimizer.step()

    return train
