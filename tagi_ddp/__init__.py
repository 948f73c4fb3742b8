"""Train pytagi networks on many processes, GPUs and machines."""

from tagi_ddp.engine import import_hook as _import_hook

_import_hook.install()

from tagi_ddp.communicators import (  # noqa: E402  (the hook comes before anything else)
    BackendUnavailable,
    Communicator,
    CommunicatorError,
    Mismatch,
    PeerLost,
    Timeout,
    init,
)
from tagi_ddp.config import DDPConfig  # noqa: E402
from tagi_ddp.data import DistributedSampler, progress, reduce_metrics  # noqa: E402
from tagi_ddp.engine.loader import cuda_available  # noqa: E402
from tagi_ddp.launch import launch  # noqa: E402
from tagi_ddp.replicas import ReplicaMismatch  # noqa: E402
from tagi_ddp.sequential import DDPSequential, NotFiniteError  # noqa: E402
from tagi_ddp.supervisor import LaunchError  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Communicator",
    "CommunicatorError",
    "DDPConfig",
    "DDPSequential",
    "DistributedSampler",
    "LaunchError",
    "Mismatch",
    "NotFiniteError",
    "PeerLost",
    "ReplicaMismatch",
    "Timeout",
    "cuda_available",
    "init",
    "launch",
    "progress",
    "reduce_metrics",
]
