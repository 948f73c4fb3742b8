"""Training of one pytagi network by several processes: DDPSequential and its settings."""

from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.replica.equality import ReplicaMismatch
from tagi_ddp.sequential.accelerate import accelerate
from tagi_ddp.sequential.ddp_sequential import DDPSequential
from tagi_ddp.sequential.many import MapError, map_networks
from tagi_ddp.sequential.output_updater import OutputUpdater
from tagi_ddp.update.not_finite import NotFiniteError

__all__ = [
    "DDPConfig",
    "DDPSequential",
    "MapError",
    "NotFiniteError",
    "OutputUpdater",
    "ReplicaMismatch",
    "accelerate",
    "map_networks",
]
