"""Ranks of an MPI job that continue without lost ones: user-level failure mitigation.

Open MPI has it under ``mpirun --with-ft ulfm``, which sets a variable of the ranks. When all
remaining ranks shrink their group, MPI finds which these are. New ranks do not join.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from tagi_ddp.communicators.communicator import Communicator
from tagi_ddp.communicators.errors import BackendUnavailable, PeerLost, Timeout
from tagi_ddp.communicators.network.mpi import MPI, outlive_ranks, start, wrap
from tagi_ddp.communicators.operations import in_time
from tagi_ddp.environment import detect

T = TypeVar("T")


class Survivors:
    """The remaining ranks of MPI's world."""

    def __init__(self, limit: float) -> None:
        """Start MPI, with all ranks, within ``limit`` seconds; raise BackendUnavailable, Timeout.

        From here on the end of this process does not wait for other ranks.
        """
        if os.environ.get("OMPI_MCA_mpi_ft_enable") != "1":  # noqa: SIM112  (so Open MPI calls it)
            raise BackendUnavailable(
                "MPI ends all ranks when one is lost, but for Open MPI 5 with its fault tolerance: "
                "start the ranks with mpirun --with-ft ulfm"
            )
        environment = detect()
        start(f"init on rank {environment.rank} of {environment.world_size} (mpi)", limit)
        outlive_ranks()
        self._group: MPI.Intracomm = MPI.COMM_WORLD

    def gather(self, values: list[int], limit: float) -> np.ndarray:
        """Return the ``values`` of all remaining ranks, one row each, in rank order.

        A call of all remaining ranks, with equally many values. Raises Timeout if one of them does
        not call within ``limit`` seconds.
        """
        table = self._gathered(values, limit)
        while table is None:
            self._group = MPI.Intracomm(_in_time(self._group.Shrink, limit))
            table = self._gathered(values, limit)
        return table

    def _gathered(self, values: list[int], limit: float) -> np.ndarray | None:
        """Return the rows, the same on all ranks; None: a rank is lost."""
        table = np.empty((self._group.size, len(values)), np.int64)

        def gather() -> bool:
            try:
                self._group.Allgather(np.array(values, np.int64), table)
            except MPI.Exception:
                self._group.Revoke()  # No rank must wait for this one.
                return False
            return True

        complete = _in_time(gather, limit)
        try:  # Some ranks may have all rows, and others not.
            agreed = _in_time(lambda: self._group.Agree(int(complete)), limit)
        except MPI.Exception:
            return None
        return table if agreed else None

    def connect(self, limit: float) -> Communicator:
        """Return a communicator of the remaining ranks; raises PeerLost, Timeout."""
        try:
            return wrap(self._group, limit)
        except MPI.Exception as error:
            raise PeerLost(f"a rank was lost while the others connected: {error}", ()) from error


def _in_time(call: Callable[[], T], limit: float) -> T:
    """Return the result of a call that has no limit of its own, or raise Timeout."""
    late = (
        f"a rank did not come within {limit:g} s, and MPI cannot go on without one that is not "
        "dead: end its process"
    )
    return in_time(call, limit, Timeout(late))
