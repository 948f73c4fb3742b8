"""What the rest of the package sees of one network's state, wherever that lives."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray

from tagi_ddp._backend import Parameters, RunningStatistics
from tagi_ddp.communicators import Communicator
from tagi_ddp.engine.layers import Layer


class Replica(Protocol):
    """The state of one Sequential on the host."""

    layers: list[Layer]
    parameters: Parameters
    statistics: RunningStatistics
    #: Whether ``parameters`` are the engine's own memory.
    in_place: bool
    #: Changes when arrays that `arrays` has returned are no longer the right ones.
    version: int

    def pull(self) -> None:
        """Make ``parameters`` show the engine's present state; call before each use."""
        ...

    def push(self) -> None:
        """Make changes of the arrays of `state` known to all."""
        ...

    def updated(self) -> None:
        """Make a change of ``parameters`` and ``statistics`` known to all."""
        ...

    def export(self) -> None:
        """Make the engine's memory, and `state`, show the present state, wherever that is kept."""
        ...

    def share(self, communicator: Communicator) -> None:
        """Give every rank rank 0's means, variances and running statistics."""
        ...

    def zeros(self) -> Any:
        """Return zeros to sum deltas in, [means | variances], float32."""
        ...

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        """Return views of all that must be equal on all replicas, with the layers' names.

        Means and variances, running statistics and their flags; valid until the next `pull`.
        """
        ...

    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return views of means and variances by `PARAMETERS`, for each layer.

        And, for BatchNorm2d, of its running averages "mu_ra" and "var_ra", and of "first_batch".
        """
        ...
