"""Scaled gradients: their mean over all ranks is the unsplit model's; what is left behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from strategy.sharded import CHANNELS, NODES, Net, draw, members_of, split_loss, whole_loss
from tagi_ddp.strategy import EnsembleLayout, GroupLayout
from tagi_ddp.strategy.gradients import remove_gradient_scale, scale_gradients
from tagi_ddp.strategy.loaders import sample_group


def layout_of(comm: Any, model: int, ensemble: int | None) -> GroupLayout:
    if ensemble is None:
        return GroupLayout(comm.size, model, 1, comm.rank)
    return EnsembleLayout(comm.size, model, 1, comm.rank, ensemble)


def worst(comm: Any, model: int, ensemble: int | None, device: str = "cpu") -> dict[str, float]:
    """Return how far each parameter's gradient, the mean over ranks, is from what it should be.

    The model is on ``device``, and the unsplit one on the CPU.
    """
    layout = layout_of(comm, model, ensemble)
    net = Net(seed=1).to(device)
    scale_gradients(net, GroupLayout(comm.size, comm.size, 1, comm.rank))  # undone by the next
    scale_gradients(net, layout)
    number, groups = sample_group(layout)
    members = members_of(layout)
    batches = []
    for sample in range(groups):
        generator = torch.Generator().manual_seed(sample)
        x, target = draw(generator, 2, NODES, CHANNELS), draw(generator, 2, NODES, 1)
        batches.append((x, target, [draw(generator, *x.shape) for _ in range(members)]))

    x, target, noises = batches[number]
    x, target, *noises = (tensor.to(device) for tensor in (x, target, *noises))
    member = layout.member if isinstance(layout, EnsembleLayout) else 0
    color = layout.subgroup_ranks.start if isinstance(layout, EnsembleLayout) else comm.rank
    with comm.split(layout.model_group) as group, comm.split(color) as subgroup:
        split_loss(net, x, target, noises[member], group, subgroup, members).backward()
    whole = Net(seed=1)
    whole_loss(whole, batches).backward()

    distances = {}
    for (name, own), expected in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert expected.grad.abs().max() > 1e-3
        comm.all_reduce(own.grad, "mean")
        distances[name] = float((own.grad.cpu() - expected.grad).abs().max())
    return distances


@pytest.mark.parametrize(
    ("model", "ensemble"),
    [(1, None), (2, None), (4, None), (1, 1), (1, 2), (2, 2), (1, 4), (2, 4), (4, 4)],
)
def test_mean_over_ranks(shm: RankPool, model: int, ensemble: int | None) -> None:
    for distances in shm.run(worst, model, ensemble):
        assert len(distances) == 7
        assert max(distances.values()) < 1e-10, distances


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nodes = nn.Module()
        self.nodes.trainable = nn.Parameter(torch.ones(1))
        self.linear = nn.Linear(1, 1, bias=False)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.early = nn.Parameter(torch.ones(1))


def factors(module: nn.Module) -> dict[str, float]:
    """Return what the gradients of a sum of the parameters are multiplied by."""
    needing = {name: p for name, p in module.named_parameters() if p.requires_grad}
    module.zero_grad()
    sum(p.sum() for p in needing.values()).backward()
    return {name: p.grad.item() for name, p in needing.items()}


GROUPS = GroupLayout(12, 6, 1, 0)
ENSEMBLE = EnsembleLayout(12, 2, 1, 0, 6)


@pytest.mark.parametrize(
    ("layout", "options", "trainable", "early", "behind"),
    [
        (GROUPS, {}, 1, 6, 6),
        (ENSEMBLE, {}, 3, 6, 6),
        (GROUPS, {"skip": ("early",)}, 6, 1, 6),
        (GROUPS, {"skip": ("early", "nodes.t")}, 1, 1, 6),
        (ENSEMBLE, {"skip": ()}, 6, 6, 6),
    ],
)
def test_factors(
    layout: GroupLayout, options: Any, trainable: float, early: float, behind: float
) -> None:
    module = Parts()
    scale_gradients(module, layout, **options)
    expected = {"nodes.trainable": trainable, "early": early, "linear.weight": behind}
    assert factors(module) == expected


def test_the_newest_factor_alone() -> None:
    module, other = Parts(), Parts()
    scale_gradients(other, GROUPS)
    for layout in (GROUPS, GROUPS, ENSEMBLE, GroupLayout(12, 3, 1, 0)):
        scale_gradients(module, layout)
    assert factors(module) == {"nodes.trainable": 1, "early": 3, "linear.weight": 3}
    for _ in range(2):
        remove_gradient_scale(module)
        assert set(factors(module).values()) == {1}
    assert factors(other)["early"] == 6


def test_nothing_is_kept_or_copied() -> None:
    module = Parts()
    attributes = set(vars(module))
    scale_gradients(module, GROUPS)
    assert set(vars(module)) == attributes
    assert factors(module)["early"] == 6
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert set(factors(copied).values()) == {1}
    assert all(value._backward_hooks is None for value in module.state_dict().values())
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None


def test_accumulated_gradients() -> None:
    module = Parts()
    scale_gradients(module, GROUPS)
    for _ in range(3):
        module.early.sum().backward()
    assert module.early.grad.item() == 18
