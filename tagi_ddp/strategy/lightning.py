"""Group strategies for the Trainer of ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from tagi_ddp.strategy.trainer_strategy import EnsGroupStrategy, GroupStrategy


class DDPGroupStrategy(GroupStrategy, DDPStrategy):
    """A DDPStrategy whose model groups share a model and its loss; see `GroupStrategy`."""


class DDPEnsGroupStrategy(EnsGroupStrategy, DDPStrategy):
    """A DDPStrategy whose ensemble groups share a loss of all members; see `EnsGroupStrategy`."""
