"""What happens at `step`: all ranks agree, reduce the deltas, and apply the same update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import numpy as np

from tagi_ddp._backend import (
    Agreement,
    Contribution,
    Parameters,
    RunningStatistics,
    ShmCommunicator,
    update,
)
from tagi_ddp.communicators import Communicator, all_gather_object
from tagi_ddp.communicators.communicator import Work
from tagi_ddp.communicators.topology import topology_of
from tagi_ddp.replica.bucket import make_bucket

# Over shared memory, for deltas in the engine's layers, every rank reads every other's; with more
# ranks than this it is less work to let each reduce its share of a bucket for all.
MOST_FUSED_RANKS = 4
# Between hosts, two or more parts of this size are reduced while backward goes on: 6 to 22 % less
# time for a step over emulated links of 1 and 5 Gbit/s, more than with 1 or 16 MB. On one host it
# costs more time of the cores than it hides.
_PART_BYTES = 4 << 20


class LateAgreement(Protocol):
    """What the ranks agreed on where the device applies it; `Exchange.take_refused` tells more."""

    def all_finished(self) -> bool:
        """Tell whether all ranks only follow the others; waits for the device."""
        ...


class Exchange(ABC):
    """Exchanges the deltas of all ranks and applies them; nothing is applied if a rank refuses.

    And averages the running statistics over the ranks, weighted by their batches.
    """

    def __init__(self, communicator: Communicator, statistics: RunningStatistics) -> None:
        """Remember whom to exchange with."""
        self._communicator = communicator
        self._statistics = statistics
        self._statistics_buffer = np.empty(statistics.size, np.float32)

    # Those that do not begin before the step have nothing to do here.

    def discard(self) -> None:  # noqa: B027
        """Forget the deltas that were started: backward is about to write new ones."""

    def start(self, parameters: Parameters, begin: int) -> None:  # noqa: B027
        """Tell that all deltas from ``begin`` on, in the flat sequence, are what they will be."""

    def start_nothing(self) -> None:  # noqa: B027
        """Tell that this rank has no deltas for the next step."""

    def first_not_finite(self, parameters: Parameters) -> str:
        """Return the name of the first layer with an own delta that is NaN or infinite, or ""."""
        return parameters.first_not_finite()

    def refusal(self, ranks: list[int], culprit: str) -> str:
        """Return the text for a step that was refused: ``ranks`` are at fault, here the layer."""
        where = f" (here: layer {culprit})" if culprit else ""
        return (
            f"step refused on all ranks: deltas of ranks {ranks} are NaN or infinite{where}. No "
            "parameter has changed. Look at the inputs, the targets and the observation variance "
            "of those ranks."
        )

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks that made an earlier step be refused, if nobody has been told yet.

        ``everything``: wait for the outcome of all steps so far. None where it is told at once.
        """
        return []

    @abstractmethod
    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement | LateAgreement:
        """Return what the ranks agreed on; `Agreement.applies` tells whether it was applied."""

    def average_statistics(self, batch: int, total: int) -> None:
        """Average, after a step that applies; ``batch`` samples of this rank, ``total`` of all."""
        buffer = self._statistics_buffer
        if self._communicator.size == 1 or buffer.size == 0:
            return
        self._statistics.pack(buffer, batch)
        self._communicator.all_reduce(buffer)
        self._statistics.unpack(buffer, total)

    def restart(self) -> None:  # noqa: B027
        """Tell that the replicas have been made equal by other means."""

    def abort(self, reason: str) -> None:  # noqa: B027
        """Let ranks know that wait on communicators of the exchange's own."""

    def close(self) -> None:  # noqa: B027
        """Close communicators of its own."""


def make_exchange(
    communicator: Communicator, replica: Any, bucket: np.ndarray | None = None
) -> Exchange:
    """Return the fastest exchange of a replica's deltas over a communicator.

    ``bucket`` is where the parameters' deltas lie, if not in the engine's layers or on a device.
    """
    parameters, statistics = replica.parameters, replica.statistics
    if not isinstance(parameters, Parameters):
        if communicator.size == 1 or communicator.device != "cpu":
            return OnDevice(communicator, replica)
        return _Bucket(communicator, statistics)  # by way of the host
    if communicator.size == 1:
        return _Alone(communicator, statistics)
    if bucket is not None:
        large = bucket.nbytes >= 2 * _PART_BYTES
        if large and not topology_of(communicator).one_host:
            return _Overlapped(communicator, statistics, parameters, bucket)
        return _Bucket(communicator, statistics, bucket)
    fits = isinstance(communicator, ShmCommunicator) and communicator.size <= MOST_FUSED_RANKS
    return _Fused(communicator, statistics) if fits else _Bucket(communicator, statistics)


class _Alone(Exchange):
    """A world of one."""

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        agreement = Agreement([contribution])
        if agreement.applies:
            parameters.apply_own(agreement.cap(average))
        return agreement


class _Fused(Exchange):
    """Over shared memory, in cache-sized chunks, in one call."""

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        return update(self._communicator, parameters, contribution, average)


class _Bucket(Exchange):
    """Over any communicator: agree, reduce one bucket of all deltas, apply it."""

    def __init__(
        self,
        communicator: Communicator,
        statistics: RunningStatistics,
        bucket: np.ndarray | None = None,
    ) -> None:
        super().__init__(communicator, statistics)
        self._in_place = bucket is not None
        self._bucket = bucket

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        agreement = agree(self._communicator, contribution)
        if not agreement.applies:
            return agreement
        if self._bucket is None:
            self._bucket = make_bucket(self._communicator, parameters)
        if contribution.batch == 0:
            self._bucket.fill(0)
        elif not self._in_place:
            parameters.pack(self._bucket)
        self._communicator.all_reduce(self._bucket)
        parameters.apply(self._bucket, agreement.divisor(average), agreement.cap(average))
        return agreement


class _Overlapped(Exchange):
    """Over any communicator, for deltas that lie in a bucket: reduce each part when it is complete.

    Backward completes the last layers first, so the parts run from the bucket's end. A part is
    reduced in place, before the ranks agree: it is applied, or not, after that.
    """

    def __init__(
        self,
        communicator: Communicator,
        statistics: RunningStatistics,
        parameters: Parameters,
        bucket: np.ndarray,
    ) -> None:
        super().__init__(communicator, statistics)
        self._bucket = bucket
        self._parts = split(parameters, _PART_BYTES)
        self._works: list[Work] = []
        self._culprit = ""

    def discard(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._culprit = ""

    def start(self, parameters: Parameters, begin: int) -> None:
        for first, end in self._parts[len(self._works) // 2 :]:
            if first < begin:
                return
            self._culprit = self._culprit or parameters.first_not_finite(first, end)
            self._reduce(first, end)

    def start_nothing(self) -> None:
        self.discard()
        self._bucket.fill(0)
        for first, end in self._parts:
            self._reduce(first, end)

    def _reduce(self, first: int, end: int) -> None:
        for half in self._bucket.reshape(2, -1):
            self._works.append(self._communicator.all_reduce(half[first:end], async_op=True))

    def first_not_finite(self, parameters: Parameters) -> str:
        self.start(parameters, 0)
        return self._culprit

    def __call__(
        self, parameters: Parameters, contribution: Contribution, average: bool
    ) -> Agreement:
        if not self._works:
            self.start_nothing()
        agreement = agree(self._communicator, contribution)
        self.discard()
        if agreement.applies:
            parameters.apply(self._bucket, agreement.divisor(average), agreement.cap(average))
        return agreement


class OnDevice(Exchange):
    """Deltas that lie on a device are reduced there, in place; the host does not wait.

    What the ranks agree on comes last: if an operation before it was aborted it is never complete,
    and then nothing is applied.
    """

    def __init__(self, communicator: Communicator, replica: Any, shards: Any = None) -> None:
        """With ``shards``, `DeviceShards`, each rank applies its part of the deltas."""
        super().__init__(communicator, replica.statistics)
        self._replica = replica
        self._shards = shards

    def first_not_finite(self, parameters: Any) -> str:
        """Return "": `words_of` looks, on the device."""
        return ""

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks that made an earlier step be refused, if nobody has been told yet."""
        refused: list[int] = self._replica.take_refused(everything)
        return refused

    def __call__(self, parameters: Any, contribution: Contribution, average: bool) -> LateAgreement:
        """Put the step into the device's queue."""
        agreement: LateAgreement = self._replica.agree(
            self._communicator, contribution, average, self._shards
        )
        return agreement

    def average_statistics(self, batch: int, total: int) -> None:
        """Do nothing: that was a part of the step."""


def split(parameters: Parameters, size: int) -> list[tuple[int, int]]:
    """Return parts of the flat sequence, the last first: whole layers, at least ``size`` bytes."""
    layers = [begin for begin, _ in parameters.blocks[::2]]
    parts, end = [], parameters.size
    for begin in reversed(layers):
        if 2 * 4 * (end - begin) >= size or begin == 0:
            parts.append((begin, end))
            end = begin
    return parts


def agree(communicator: Communicator, contribution: Contribution) -> Agreement:
    """Return what follows from the contributions of all ranks; a collective call."""
    words = [contribution.batch, int(contribution.finite), int(contribution.finished)]
    if communicator.device == "cpu":
        everyone = np.empty((communicator.size, len(words)), np.int64)
        communicator.all_gather(np.array(words, np.int64), everyone)
    else:
        everyone = np.array(all_gather_object(communicator, words))
    return Agreement(
        [
            Contribution(int(batch), bool(finite), bool(finished))
            for batch, finite, finished in everyone
        ]
    )
