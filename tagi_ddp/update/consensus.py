"""What the ranks of a group know together, and how they come to it."""

from __future__ import annotations

from typing import Any

from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.replica.protocol import AdaptiveSum, Replica
from tagi_ddp.replica.staging import Sum, as_array, broadcast, fill
from tagi_ddp.update.compressed_sum import Compress, CompressedSum, Pending


class Consensus:
    """The posterior of all that the ranks of a group have told each other; equal on all of them.

    ``adaptive``: where the ranks have learned alike their changes are averaged, not summed
    (cpp_backend/update/adaptive_sum.h). ``agreement`` then tells by layer how much alike, from 0 to
    1, at the last merge. ``compress``: changes travel in so many bits.
    """

    def __init__(
        self,
        communicator: Communicator,
        replica: Replica,
        adaptive: bool,
        compress: Compress | None,
    ) -> None:
        self._replica = replica
        self._compress = compress
        self._damping = replica.adaptive_sum() if adaptive else None
        self.gaussians = replica.zeros()
        size = len(self.gaussians)
        # A change, and what describes it.
        self.bucket = replica.bucket(communicator, self._damping.described if self._damping else 0)
        self.change, self._description = self.bucket[:size], self.bucket[size:]
        self.steps = 0  # that this rank has made since its last change
        self.agreement = [0.0] * len(replica.layers)
        self.enter(communicator)
        self.begin()

    def enter(self, communicator: Communicator) -> None:
        """Be that of another group, whose ranks know the same; what rounding kept is forgotten."""
        self._communicator = communicator
        self._compressed = None
        if self._compress and communicator.size > 1:
            self._compressed = CompressedSum(communicator, self._replica, self._compress)

    def begin(self) -> None:
        """Begin anew with the present state."""
        self._replica.parameters.read_posterior(self.gaussians)
        self.steps = 0
        if self._damping:
            self._damping.restart()
        if self._compressed:
            self._compressed.restart()

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here, on this rank."""
        return {
            "gaussians": as_array(self.gaussians),
            "steps": self.steps,
            "agreement": list(self.agreement),
            "damping": memory_of(self._damping),
            "compressed": self._compressed.state_dict() if self._compressed else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called, by a consensus of the same settings."""
        fill(self.gaussians, state["gaussians"])
        self.steps = state["steps"]
        self.agreement = list(state["agreement"])
        remember(self._damping, state["damping"])
        if self._compressed:
            self._compressed.load_state_dict(state["compressed"])

    def take_over(self, source: int) -> None:
        """Know what rank ``source`` knows; a collective call."""
        memory = [self._damping.previous, self._damping.trust] if self._damping else []
        for buffer in (self.gaussians, *memory):
            broadcast(self._communicator, buffer, source)

    def merge(self, now: Buffer) -> list[int]:
        """Take in what each rank has learned, which has led it ``now`` to another posterior.

        Returns how many parameters of each layer took only a part of it.
        """
        if self._communicator.size == 1:
            self.gaussians[:] = now
            self.steps = 0
            return [0] * len(self._replica.layers)
        self._replica.parameters.change_since(now, self.gaussians, self.change)
        self.start().wait()
        self.agree()
        return self._replica.parameters.add_change(self.gaussians, self.gaussians, self.change)

    def start(self) -> Pending:
        """Begin to add up the ranks' changes, of which `change` holds this one's."""
        if self._damping:
            self._damping.describe(self.change, self.gaussians, self.steps, self._description)
        self.steps = 0
        if self._compressed:
            return self._compressed.start(self.change, self._description, self.gaussians)
        return Sum(self._communicator, self.bucket)

    def share(self, group: Communicator, root: int) -> None:
        """Give the sum to ranks of another group, which have the same posterior.

        They wait twice as long as ``root``, which has waited for the sum.
        """
        broadcast(group, self.bucket, root, 2 * group.timeout)

    def agree(self) -> None:
        """Make of the sum of all changes, in `change`, what is taken in."""
        if self._damping:
            ranks = self._communicator.size
            self.agreement = self._damping.damp(
                self.change, self.gaussians, self._description, ranks
            )


def memory_of(damping: AdaptiveSum | None) -> dict[str, Any] | None:
    """Return what it remembers of the sums before, for `remember`."""
    if damping is None:
        return None
    return {"previous": as_array(damping.previous), "trust": as_array(damping.trust)}


def remember(damping: AdaptiveSum | None, memory: dict[str, Any] | None) -> None:
    """Let it remember what `memory_of` has returned."""
    if damping is not None and memory is not None:
        fill(damping.previous, memory["previous"])
        fill(damping.trust, memory["trust"])
