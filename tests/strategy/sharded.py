"""A model that is split over the ranks of a group, a loss over members, and both unsplit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tagi_ddp.sharding import (
    change_channels_in_shape,
    gather_tensor,
    get_shape_shards,
    shard_tensor,
    sync_tensor,
)
from tagi_ddp.strategy import EnsembleLayout, GroupLayout

Tensor = torch.Tensor
NODES, CHANNELS, WIDTH = 5, 3, 4


class Net(nn.Module):
    """Nodes of a graph with edges between all of them: (batch, nodes, 3) to (batch, nodes, 1)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("edges", draw(generator, NODES, NODES))
        self.node_trainable = nn.Parameter(draw(generator, NODES, 2))
        self.encode = nn.Linear(CHANNELS + 2, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.decode = nn.Linear(WIDTH, 1)
        self.double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(draw(generator, *parameter.shape))

    def forward(self, x: Tensor, group: Any = None) -> Tensor:
        """Return what the ranks of ``group`` compute, each for its nodes; of all, on every rank."""
        trainable = self.node_trainable.expand(x.shape[0], -1, -1)
        whole = torch.cat([x, trainable], dim=-1)
        shapes = get_shape_shards(whole, 1, group)
        own = torch.tanh(self.encode(shard_tensor(whole, 1, shapes, group)))
        others = sync_tensor(own, 1, change_channels_in_shape(shapes, WIDTH), group)
        edges = shard_tensor(self.edges, 0, get_shape_shards(self.edges, 0, group), group)
        own = self.decode(torch.tanh(self.mix(own + edges @ others)))
        return gather_tensor(own, 1, change_channels_in_shape(shapes, 1), group)


def draw(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def loss_of(members: Tensor, target: Tensor) -> Tensor:
    """Return the loss of members' (members, batch, nodes, 1), which each of them changes."""
    spread = members.var(dim=0, unbiased=False)
    return ((members.mean(dim=0) - target) ** 2).mean() + 0.3 * (spread**2).mean()


def split_loss(
    net: Net, x: Tensor, target: Tensor, noise: Tensor, group: Any, subgroup: Any, members: int
) -> Tensor:
    """Return the loss, which is the same on all ranks that read ``x``."""
    own = net(x + noise, group)[None]
    return loss_of(gather_tensor(own, 0, [list(own.shape)] * members, subgroup), target)


def whole_loss(net: nn.Module, groups: Sequence[tuple[Tensor, Tensor, Sequence[Tensor]]]) -> Tensor:
    """Return the mean of the losses of all who read other samples: x, target, members' noises."""
    losses = [
        loss_of(torch.stack([net(x + noise) for noise in noises]), target)
        for x, target, noises in groups
    ]
    return torch.stack(losses).mean()


def members_of(layout: GroupLayout) -> int:
    return layout.members if isinstance(layout, EnsembleLayout) else 1
