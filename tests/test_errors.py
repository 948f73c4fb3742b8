"""All errors of the package travel to another process, as a pool's do."""

from __future__ import annotations

import pickle

import pytest

from tagi_ddp import LaunchError, MapError, NotFiniteError, ReplicaMismatch
from tagi_ddp.checkpoint import CheckpointError, DamagedFile
from tagi_ddp.communicators import (
    BackendUnavailable,
    CommunicatorError,
    Mismatch,
    PeerLost,
    Timeout,
)
from tagi_ddp.communicators.equality import OtherIndexError, OtherTypeError, RanksDiffer
from tagi_ddp.communicators.nccl import NcclMissing
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.optim.daso.batches import BatchesDiffer, NotSet
from tagi_ddp.optim.daso.finite import NotFinite
from tagi_ddp.replica.parameter_file import ParameterFileError
from tagi_ddp.sequential.run_state import NotBetweenSteps

OF_COMMUNICATORS = (
    CommunicatorError,
    Timeout,
    PeerLost,
    Mismatch,
    BackendUnavailable,
    NcclMissing,
)
OF_A_TEXT = (
    ReplicaMismatch,
    RanksDiffer,
    CheckpointError,
    DamagedFile,
    LayoutError,
    BatchesDiffer,
    NotSet,
    NotFinite,
    ParameterFileError,
    NotBetweenSteps,
    OtherIndexError,
    OtherTypeError,
)


@pytest.mark.parametrize(
    "error",
    [
        NotFiniteError("refused", [0, 2]),
        MapError("failed", {1: "Traceback"}, [3, None]),
        LaunchError("died", 1, -9, "Traceback"),
        *(kind("rank 1 died", [1]) for kind in OF_COMMUNICATORS),
        *(kind("different") for kind in OF_A_TEXT),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_whole(error: Exception) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)
