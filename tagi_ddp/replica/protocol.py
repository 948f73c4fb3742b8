"""The interface of a replica, the state of one network, on the host or on a device.

Flat buffers are float32, numpy arrays on the host and tensors on a device; Gaussians are [means |
variances], deltas too, 2 * size elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from numpy.typing import NDArray

from tagi_ddp._backend import Contribution
from tagi_ddp._backend import Parameters as HostParameters
from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.layers import Layer


class Parameters(Protocol):
    """The means, variances and deltas of all layers, in order, as one flat sequence."""

    @property
    def size(self) -> int:
        """The number of parameters."""
        ...

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """(begin, count) of each layer's weights, and of its biases, in turn."""
        ...

    @property
    def negative_variances(self) -> list[int]:
        """By layer, the number of weights' variances that the last step found not positive."""
        ...

    def first_not_finite(self) -> str:
        """Return the name of the first layer with a delta that is NaN or infinite, or ""."""
        ...

    def pack(self, bucket: FloatArray) -> None:
        """Copy the deltas to a bucket on the host."""
        ...

    def apply(self, bucket: FloatArray, divisor: float, cap: float) -> None:
        """Divide, cap and apply the deltas of a bucket on the host."""
        ...

    def pack_shard(self, bucket: FloatArray, begin: int) -> None:
        """Copy the deltas of the range from ``begin`` on, [means | variances]."""
        ...

    def apply_shard(self, gaussians: FloatArray, begin: int, divisor: float, cap: float) -> None:
        """Divide, cap and apply the range's deltas, and replace them by the posterior."""
        ...

    def take_shard(self, gaussians: FloatArray, begin: int) -> None:
        """Replace the range by the posterior that another rank's `apply_shard` has written."""
        ...

    def read_posterior(self, gaussians: FloatArray) -> None:
        """Copy means and variances to ``gaussians``, on the host."""
        ...

    def write_posterior(self, gaussians: FloatArray) -> None:
        """Replace means and variances by ``gaussians``, on the host."""
        ...

    def add_deltas_to(self, sums: Buffer, layers: list[bool]) -> None:
        """Add the deltas of the layers that ``layers`` flags to ``sums``."""
        ...

    def add_to_deltas(self, sums: Buffer, layers: list[bool]) -> None:
        """Add ``sums`` to the deltas of the layers that ``layers`` flags."""
        ...


class QueuedAgreement(Protocol):
    """The agreement of the ranks on a step that a device makes later."""

    #: true if the step is refused, a tensor on the device
    refused: Any

    def all_finished(self) -> bool:
        """Return whether all ranks only follow the others; waits for the device."""
        ...


class Replica(Protocol):
    """The state of one Sequential."""

    #: The layers with parameters, in order; a block is replaced by its layers.
    layers: list[Layer]
    #: The device of the parameters: "cpu", "cuda:0".
    device: str

    @property
    def version(self) -> int:
        """A number that changes when arrays that `arrays` has returned are no longer valid."""
        ...

    @property
    def parameters(self) -> Parameters:
        """Means, variances and deltas."""
        ...

    @property
    def on_host(self) -> HostParameters:
        """The parameters in the engine's memory on the host; `export` updates their values."""
        ...

    @property
    def in_place(self) -> bool:
        """True if the parameters are the engine's own memory on the host."""
        ...

    def pull(self) -> None:
        """Make ``parameters`` show the engine's present state; call before each use."""
        ...

    def push(self) -> None:
        """Copy changes of the arrays of `state` to the engine, and to the device of the replica."""
        ...

    def updated(self) -> None:
        """Record a change of ``parameters`` or of the running statistics; call it after each."""
        ...

    def export(self) -> None:
        """Copy the present state, if it is elsewhere, to the engine's memory and to `state`."""
        ...

    def share(self, communicator: Communicator, root: int = 0) -> None:
        """Copy the means, variances and running statistics of rank ``root`` to all ranks."""
        ...

    def zeros(self) -> Buffer:
        """Return zeros for deltas, on the device of the replica."""
        ...

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        """Return views of all that must be equal on all replicas, with the layers' names.

        Means and variances, running statistics and their flags; valid until the next `pull`.
        """
        ...

    def arrays(self) -> list[dict[str, Any]]:
        """Return views of means and variances by `PARAMETERS`, for each layer.

        A BatchNorm2d also has its running averages "mu_ra" and "var_ra", and "first_batch".
        """
        ...

    def step_alone(self, samples: int, alone_of: int) -> str | QueuedAgreement:
        """Apply the own deltas, of ``samples`` samples, capped as for one of ``alone_of`` ranks.

        The step limit is that of the combined batch divided by sqrt(alone_of), because independent
        steps add up like a random walk. Nothing is applied if deltas are NaN or infinite: returns
        the first such layer, or "". If a device makes the step later, returns its agreement, and
        `take_refused` reports a refusal.
        """
        ...

    def queue(
        self, communicator: Communicator, average: bool, sharded: bool
    ) -> Callable[[Contribution], QueuedAgreement] | None:
        """Return a function that puts a step of all ranks into the device's queue, if it can."""
        ...

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks at fault for an earlier refused step that has not been reported yet.

        ``everything``: wait for the outcome of all steps so far. Empty if refusals raise at once.
        """
        ...

    def keep_statistics(self) -> None:
        """Copy the running statistics and their flags."""
        ...

    def restore_statistics(self) -> None:
        """Restore the last copy of `keep_statistics`."""
        ...

    def restore_statistics_if(self, refused: Any) -> bool:
        """Restore it, without a wait, if ``refused``, a tensor on the device, is true.

        Returns False, and does nothing, if only the host can restore.
        """
        ...

    def average_statistics(self, communicator: Communicator, samples: int, total: int) -> None:
        """Average running statistics over the ranks, weighted by their samples, ``total`` of all.

        A collective call.
        """
        ...
