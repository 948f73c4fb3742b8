"""The ranks of a test, as the marker ``ranks`` of its class names them.

``@pytest.mark.ranks("gloo", 2, 3)``: on two ranks, and on three. Options are the fields of `Ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Ranks:
    """The ranks of a test: the first ``size`` of a pool of ``most``."""

    backend: str
    size: int
    most: int
    hosts: str = ""  # a letter for each rank, that of its emulated host
    levels: str = ""  # the variable TAGI_DDP_TWO_LEVELS
    gpu: bool = False  # over NCCL's own library, on GPUs; else over its stand-in
    copied: bool = False  # tests have buffers on the host, which are copied to the device

    @property
    def id(self) -> str:
        return f"gpu-{self.size}" if self.gpu else str(self.size)

    def arguments(self, request: pytest.FixtureRequest) -> dict[str, dict[str, str]]:
        """Return arguments of RankPool for these ranks. Skip the test if it needs other GPUs."""
        if self.backend != "nccl":
            variables = {"RANK_POOL_HOSTS": self.hosts, "TAGI_DDP_TWO_LEVELS": self.levels}
            return {"environment": {name: value for name, value in variables.items() if value}}
        from support.on_device import VARIABLE, gpus, why_not  # which loads torch

        if not self.gpu:
            found = {"environment": dict(request.getfixturevalue("stand_in"))}
        elif reason := why_not(self.size):
            pytest.skip(reason)
        else:
            found = gpus(self.size)
        if self.copied:
            found["environment"][VARIABLE] = "cuda" if self.gpu else "copy"
        return found


def ranks_of(backend: str, *sizes: int, slow: bool, gpu: bool = False, **options: Any) -> list[Any]:
    """Return a parameter for each number of ranks; for a slow test only for the largest."""
    found = []
    for size in sizes[-1:] if slow else sizes:
        # The worlds of MPI, and groups of GPUs, are of one size; the others' pools of any.
        most = size if backend == "mpi" or gpu else max(sizes)
        ranks = Ranks(backend, size, most, gpu=gpu, **options)
        found.append(pytest.param(ranks, id=ranks.id, marks=[pytest.mark.gpu] * gpu))
    return found
