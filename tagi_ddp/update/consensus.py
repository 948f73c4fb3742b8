"""What the ranks of a group know together, and how they come to it."""

from __future__ import annotations

from tagi_ddp.communicators import Buffer, Communicator
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.replica.staging import Sum, broadcast
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
        self._communicator = communicator
        self._replica = replica
        self._damping = None
        if adaptive and communicator.size > 1:
            self._damping = replica.adaptive_sum(communicator.size)
        self.gaussians = replica.zeros()
        size = len(self.gaussians)
        # A change, and of each of its blocks the square.
        self._bucket = replica.bucket(communicator, self._damping.blocks if self._damping else 0)
        self.change, self._squares = self._bucket[:size], self._bucket[size:]
        self._compressed = None
        if compress and communicator.size > 1:
            self._compressed = CompressedSum(communicator, replica, compress)
        self.agreement = [0.0] * len(replica.layers)
        self.begin()

    def begin(self) -> None:
        """Begin anew with the present state."""
        self._replica.parameters.read_posterior(self.gaussians)
        if self._damping:
            self._damping.restart()
        if self._compressed:
            self._compressed.restart()

    def merge(self, now: Buffer) -> list[int]:
        """Take in what each rank has learned, which has led it ``now`` to another posterior.

        Returns how many parameters of each layer took only a part of it.
        """
        if self._communicator.size == 1:
            self.gaussians[:] = now
            return [0] * len(self._replica.layers)
        self._replica.parameters.change_since(now, self.gaussians, self.change)
        self.start().wait()
        self.agree()
        return self._replica.parameters.add_change(self.gaussians, self.gaussians, self.change)

    def start(self) -> Pending:
        """Begin to add up the ranks' changes, of which `change` holds this one's."""
        if self._damping:
            self._damping.squares(self.change, self.gaussians, self._squares)
        if self._compressed:
            return self._compressed.start(self.change, self._squares, self.gaussians)
        return Sum(self._communicator, self._bucket)

    def share(self, group: Communicator, root: int) -> None:
        """Give the sum to ranks of another group, which have the same posterior."""
        broadcast(group, self._bucket, root)

    def agree(self) -> None:
        """Make of the sum of all changes, in `change`, what is taken in."""
        if self._damping:
            self.agreement = self._damping.damp(self.change, self.gaussians, self._squares)
