"""torch's schedules of learning rates go on from any step as if they had not been interrupted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as of

from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.communicators.single import SingleCommunicator

STEPS = 12


def sequential(sgd: Any) -> Any:
    parts = [of.ConstantLR(sgd, 0.5, 2), of.MultiStepLR(sgd, [2, 2, 4]), of.ExponentialLR(sgd, 0.9)]
    return of.SequentialLR(sgd, parts, [3, 9])


def chained(sgd: Any) -> Any:
    return of.ChainedScheduler([of.LinearLR(sgd, 0.1, 1.0, 4), of.MultiStepLR(sgd, [3, 6])], sgd)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda sgd: of.LambdaLR(sgd, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda sgd: of.MultiplicativeLR(sgd, lambda step: 0.9),
    "StepLR": lambda sgd: of.StepLR(sgd, 3),
    "MultiStepLR": lambda sgd: of.MultiStepLR(sgd, [2, 5, 5, 7]),
    "ConstantLR": lambda sgd: of.ConstantLR(sgd, 0.1, 4),
    "LinearLR": lambda sgd: of.LinearLR(sgd, 0.1, 1.0, 7),
    "ExponentialLR": lambda sgd: of.ExponentialLR(sgd, 0.8),
    "SequentialLR": sequential,
    "CosineAnnealingLR": lambda sgd: of.CosineAnnealingLR(sgd, 5),
    "ChainedScheduler": chained,
    "ReduceLROnPlateau": lambda sgd: of.ReduceLROnPlateau(sgd, patience=1, cooldown=1),
    "CyclicLR": lambda sgd: of.CyclicLR(sgd, 0.01, 0.2, 3, mode="exp_range", gamma=0.9),
    "CyclicLR by a function": lambda sgd: of.CyclicLR(sgd, 0.01, 0.2, 3, scale_fn=lambda x: 1 / x),
    "CosineAnnealingWarmRestarts": lambda sgd: of.CosineAnnealingWarmRestarts(sgd, 3, 2),
    "OneCycleLR": lambda sgd: of.OneCycleLR(sgd, 0.3, STEPS, three_phase=True),
    "PolynomialLR": lambda sgd: of.PolynomialLR(sgd, 8, 2.0),
}


def test_all_are_tried() -> None:
    assert set(of.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_going_on(name: str, tmp_path: Path) -> None:
    def part(first: int, saves: bool) -> list[list[float]]:
        torch.manual_seed(0)
        net = torch.nn.Linear(3, 1)
        groups = [{"params": [net.weight]}, {"params": [net.bias], "lr": 0.05}]
        sgd = torch.optim.SGD(groups, 0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a step of the schedule before one of the optimizer
            scheduler = SCHEDULERS[name](sgd)
        parts = {"net": net, "sgd": sgd, "scheduler": scheduler}
        found = []
        with Checkpoints(
            tmp_path, parts, communicator=SingleCommunicator(), keep=STEPS
        ) as checkpoints:
            if first:
                assert checkpoints.resume(first) == first
            for step in range(first, STEPS):
                sgd.zero_grad()
                net(torch.full((2, 3), float(step))).sum().backward()
                sgd.step()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                found.append([*(g["lr"] for g in sgd.param_groups), *net.weight[0].tolist()])
                if saves:
                    checkpoints.save(step + 1)
        return found

    whole = part(0, saves=True)
    for first in range(1, STEPS):
        assert part(first, saves=False) == whole[first:], first
