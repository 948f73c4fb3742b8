"""What the rest of the package sees of one network's state, wherever that lives.

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
        """How many variances of each layer's weights the last step found not positive."""
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
        """Copy the deltas of the range that begins there, [means | variances]."""
        ...

    def apply_shard(self, gaussians: FloatArray, begin: int, divisor: float, cap: float) -> None:
        """Divide, cap and apply the range's deltas, and replace them by the posterior."""
        ...

    def take_shard(self, gaussians: FloatArray, begin: int) -> None:
        """Take the posterior that another rank's `apply_shard` has reached."""
        ...

    def read_posterior(self, gaussians: Buffer) -> None:
        """Copy means and variances to ``gaussians``."""
        ...

    def write_posterior(self, gaussians: Buffer) -> None:
        """Replace means and variances by ``gaussians``."""
        ...

    def change_since(self, now: Buffer, before: Buffer, change: Buffer) -> None:
        """Write how Gaussians came from others: [precisions | weighted means]."""
        ...

    def add_change(
        self, gaussians: Buffer, reference: Buffer, change: Buffer, own: Buffer | None = None
    ) -> list[int]:
        """Multiply Gaussians by ``change`` less ``own``, relative to the means of ``reference``.

        Returns how many parameters of each layer took only a part of it.
        """
        ...

    def add_deltas_to(self, sums: Buffer, layers: list[bool]) -> None:
        """Add the deltas of the layers that are flagged to ``sums``."""
        ...

    def add_to_deltas(self, sums: Buffer, layers: list[bool]) -> None:
        """Add ``sums`` to the deltas of the layers that are flagged."""
        ...


class AdaptiveSum(Protocol):
    """Sums of changes, damped where ranks agree: cpp_backend/update/adaptive_sum.h."""

    @property
    def previous(self) -> Any:
        """The weighted half of the sum before."""
        ...

    @property
    def trust(self) -> Any:
        """By block, how far sums are trusted."""
        ...

    @property
    def described(self) -> int:
        """How many numbers describe a change."""
        ...

    def describe(self, change: Any, before: Any, steps: float, description: Any) -> None:
        """Describe a rank's change in so many steps since ``before``."""
        ...

    def damp(self, change: Any, before: Any, description: Any, ranks: int) -> list[float]:
        """Damp the sum of the changes of so many ranks, and so is ``description`` that of theirs.

        Returns by layer how far the ranks agree: 0, orthogonal, to 1, the same.
        """
        ...

    def restart(self) -> None:
        """Forget the sums before."""
        ...


class Codec(Protocol):
    """Floats in few bits, for the wire."""

    def floats(self, count: int) -> Any:
        """Return zeros."""
        ...

    def units(self, before: Any) -> Any:
        """Return what makes changes since Gaussians ``before`` alike: factors of both halves."""
        ...

    def compress(self, values: Any) -> Any:
        """Return bytes of ``values``, whole blocks, which are left with what that has dropped."""
        ...

    def add(self, compressed: Any, values: Any) -> None:
        """Add what `compress` has returned to ``values``."""
        ...

    def join(self, compressed: Any, exact: Any, rows: int) -> Any:
        """Return rows of bytes: of both, equally many in each."""
        ...

    def split(self, joined: Any, exact: int) -> tuple[Any, Any]:
        """Return what `join` has joined, ``exact`` floats in each row."""
        ...


class QueuedAgreement(Protocol):
    """What the ranks agree on for a step that a device carries out later."""

    #: whether the step is refused, a tensor on the device
    refused: Any

    def all_finished(self) -> bool:
        """Tell whether all ranks only follow the others; waits for the device."""
        ...


class Replica(Protocol):
    """The state of one Sequential."""

    #: Those with parameters, in order, the layers inside of blocks in place of the blocks.
    layers: list[Layer]
    #: Where the parameters live: "cpu", "cuda:0".
    device: str

    @property
    def version(self) -> int:
        """Changes when arrays that `arrays` has returned are no longer the right ones."""
        ...

    @property
    def parameters(self) -> Parameters:
        """Means, variances and deltas."""
        ...

    @property
    def memory(self) -> HostParameters | None:
        """The same, where C++ can work on them: in the host's memory; else None."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether these are the engine's own memory on the host."""
        ...

    def pull(self) -> None:
        """Make ``parameters`` show the engine's present state; call before each use."""
        ...

    def push(self) -> None:
        """Make changes of the arrays of `state` known to all."""
        ...

    def updated(self) -> None:
        """Make a change of ``parameters`` or of the running statistics known to all."""
        ...

    def export(self) -> None:
        """Make the engine's memory, and `state`, show the present state, wherever that is kept."""
        ...

    def share(self, communicator: Communicator, root: int = 0) -> None:
        """Give every rank the means, variances and running statistics of rank ``root``."""
        ...

    def zeros(self) -> Buffer:
        """Return zeros for deltas, Gaussians or a change of them."""
        ...

    def bucket(self, communicator: Communicator, more: int) -> Buffer:
        """Return the same and ``more``, where ``communicator`` reduces fastest, if anywhere."""
        ...

    def codec(self, bits: int) -> Codec:
        """Return what brings floats into 8 or 16 bits."""
        ...

    def adaptive_sum(self) -> AdaptiveSum:
        """Return what damps sums of ranks' changes."""
        ...

    def state(self) -> list[tuple[str, NDArray[Any]]]:
        """Return views of all that must be equal on all replicas, with the layers' names.

        Means and variances, running statistics and their flags; valid until the next `pull`.
        """
        ...

    def arrays(self) -> list[dict[str, Any]]:
        """Return views of means and variances by `PARAMETERS`, for each layer.

        And, for BatchNorm2d, of its running averages "mu_ra" and "var_ra", and of "first_batch".
        """
        ...

    def step_alone(self, samples: int, alone_of: int) -> str | QueuedAgreement:
        """Apply the own deltas, of ``samples`` samples, capped as one of ``alone_of`` ranks does.

        Together these step by all of their samples, and steps that differ add up as in a random
        walk, to the root of their number: so each goes that much less far than one for all would.
        Nothing is applied if some are NaN or infinite: returns the first layer with such, or "".
        Where a device carries it out later, returns its agreement, and `take_refused` tells.
        """
        ...

    def queue(
        self, communicator: Communicator, average: bool, sharded: bool
    ) -> Callable[[Contribution], QueuedAgreement] | None:
        """Return what puts a whole step of all ranks into the device's queue, if it can."""
        ...

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks that made an earlier step be refused, if nobody has been told yet.

        ``everything``: wait for the outcome of all steps so far. None where it is told at once.
        """
        ...

    def keep_statistics(self) -> None:
        """Copy the running statistics and their flags."""
        ...

    def restore_statistics(self) -> None:
        """Put back what `keep_statistics` has copied last."""
        ...

    def restore_statistics_if(self, refused: Any) -> bool:
        """Put it back if ``refused``, a tensor on the device, is true; do not wait for it.

        Returns False, and has done nothing, where only the host can do this.
        """
        ...

    def average_statistics(self, communicator: Communicator, samples: int, total: int) -> None:
        """Average running statistics over the ranks, weighted by their samples, ``total`` of all.

        A collective call.
        """
        ...
