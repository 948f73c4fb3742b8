"""Communicators: the collectives of the package, one interface for every backend."""

from tagi_ddp.communicators.communicator import (
    Buffer,
    Communicator,
    ReduceOp,
    Work,
    all_gather_object,
)
from tagi_ddp.communicators.errors import (
    BackendUnavailable,
    CommunicatorError,
    Mismatch,
    PeerLost,
    Timeout,
)
from tagi_ddp.communicators.init import BACKENDS, as_communicator, init
from tagi_ddp.communicators.levels import Levels

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "Buffer",
    "Communicator",
    "CommunicatorError",
    "Levels",
    "Mismatch",
    "PeerLost",
    "ReduceOp",
    "Timeout",
    "Work",
    "all_gather_object",
    "as_communicator",
    "init",
]
