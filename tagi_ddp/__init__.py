"""Train pytagi networks on many processes, GPUs and machines."""

try:
    import tagi_ddp._backend as _backend  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"{__path__[0]} has no C++ backend that Python can load ({error}). If this is a clone that "
        "hides an installed tagi_ddp, run Python in another folder; or install it in place, there: "
        "pip install --editable '.[torch]'"
    ) from error

from tagi_ddp.communicators import (
    BackendUnavailable,
    Communicator,
    CommunicatorError,
    Mismatch,
    PeerLost,
    Timeout,
    init,
)
from tagi_ddp.data import DistributedSampler, progress, reduce_metrics
from tagi_ddp.engine import import_hook as _import_hook
from tagi_ddp.engine.loader import cuda_available
from tagi_ddp.launcher.failure import LaunchError
from tagi_ddp.launcher.launch import launch
from tagi_ddp.sequential import (
    DDPConfig,
    DDPSequential,
    MapError,
    NotFiniteError,
    OutputUpdater,
    ReplicaMismatch,
    accelerate,
    map_networks,
)

# `import pytagi` works from here on, also where Python does not read our .pth file.
_import_hook.install()

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "Communicator",
    "CommunicatorError",
    "DDPConfig",
    "DDPSequential",
    "DistributedSampler",
    "LaunchError",
    "MapError",
    "Mismatch",
    "NotFiniteError",
    "OutputUpdater",
    "PeerLost",
    "ReplicaMismatch",
    "Timeout",
    "accelerate",
    "cuda_available",
    "init",
    "launch",
    "map_networks",
    "progress",
    "reduce_metrics",
]
