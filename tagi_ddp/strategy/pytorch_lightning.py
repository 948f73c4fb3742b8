"""Group strategies for the Trainer of ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from tagi_ddp.strategy.trainer_strategy import EnsGroupStrategy, GroupStrategy


class DDPGroupStrategy(GroupStrategy, DDPStrategy):
    """A DDPStrategy whose model groups share a model and its loss; see `GroupStrategy`."""


class DDPEnsGroupStrategy(EnsGroupStrategy, DDPStrategy):
    """A DDPStrategy whose ensemble groups share a loss of all members; see `EnsGroupStrategy`."""
