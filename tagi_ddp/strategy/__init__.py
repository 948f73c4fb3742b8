"""Groups of ranks that share a model, a reader, or an ensemble."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError("tagi_ddp.strategy needs torch: pip install '.[torch]'")

from tagi_ddp.strategy.group_strategy import DDPEnsGroupStrategy, DDPGroupStrategy
from tagi_ddp.strategy.layout import EnsembleLayout, GroupLayout
from tagi_ddp.strategy.mixture import mixture
from tagi_ddp.strategy.seeds import base_seed, group_seed, seed_everything

__all__ = [
    "DDPEnsGroupStrategy",
    "DDPGroupStrategy",
    "EnsembleLayout",
    "GroupLayout",
    "base_seed",
    "group_seed",
    "mixture",
    "seed_everything",
]
