"""Train pytagi networks on many processes, GPUs and machines."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

try:
    import tagi_ddp._backend as _backend  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"{__path__[0]} has no C++ backend that Python can load ({error}). If this is a clone that "
        "hides an installed tagi_ddp, run Python in another folder; or install it in place, there: "
        "pip install --editable ."
    ) from error

from tagi_ddp.engine import import_hook as _import_hook

if TYPE_CHECKING:
    from tagi_ddp import checkpoint as checkpoint
    from tagi_ddp import communicators as communicators
    from tagi_ddp import data as data
    from tagi_ddp import launcher as launcher
    from tagi_ddp import optim as optim
    from tagi_ddp import parallel as parallel
    from tagi_ddp import plan as plan
    from tagi_ddp import sequential as sequential
    from tagi_ddp import sharding as sharding
    from tagi_ddp import sklearn as sklearn
    from tagi_ddp import strategy as strategy
    from tagi_ddp.communicators import (
        BackendUnavailable,
        Communicator,
        CommunicatorError,
        Mismatch,
        PeerLost,
        Timeout,
    )
    from tagi_ddp.communicators.init import init
    from tagi_ddp.data import (
        DistributedSampler,
        gather,
        log,
        prepare,
        progress,
        reduce_metrics,
        seed_ranks,
    )
    from tagi_ddp.launcher.failure import LaunchError
    from tagi_ddp.launcher.launch import launch
    from tagi_ddp.sequential import (
        DDPConfig,
        DDPSequential,
        MapError,
        NotFiniteError,
        OutputUpdater,
        ReplicaMismatch,
        map_networks,
    )
    from tagi_ddp.sequential.accelerate import accelerate

# `import pytagi` works from here on, even if Python does not read our .pth file.
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
    "gather",
    "init",
    "launch",
    "log",
    "map_networks",
    "prepare",
    "progress",
    "reduce_metrics",
    "seed_ranks",
]

# The packages that define the names above. Packages are imported on first use: numpy takes longer
# than most commands, and some packages need an extra.
_HOMES = ("communicators", "data", "sequential", "launcher")
_PACKAGES = (*_HOMES, "checkpoint", "optim", "parallel", "plan", "sharding", "sklearn", "strategy")

if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> Any:
        """Return a public name or a public package (PEP 562)."""
        if name in _PACKAGES:
            return _import_module(f"{__name__}.{name}")
        if name in __all__:
            for home in _HOMES:
                module = _import_module(f"{__name__}.{home}")
                if name in module.__all__:
                    globals()[name] = getattr(module, name)
                    return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
