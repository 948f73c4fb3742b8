"""The exchange of a step: all ranks agree, reduce the deltas, and apply the same update."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tagi_ddp._backend import Agreement, Contribution, Pace, SharedStep, ShmCommunicator
from tagi_ddp.communicators import Communicator, Work, all_gather_object
from tagi_ddp.compute.local_network import Early
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica import Replica
from tagi_ddp.replica.staging import host_bucket
from tagi_ddp.trace.timeline import timeline, traced
from tagi_ddp.update.not_finite import NotFiniteError, refusal

if TYPE_CHECKING:
    from tagi_ddp.replica.device_agreement import DeviceAgreement

# Between hosts, two or more parts of this size are reduced while backward computes: a step takes 6
# to 22 % less time over emulated links of 1 and 5 Gbit/s, and parts of 1 or 16 MB save less. On one
# host this costs more time of the cores than it hides.
PART_BYTES = 4 << 20


@dataclass(frozen=True)
class Setting:
    """The settings of an exchange.

    average: True to average deltas, False to sum them. bucket: where the deltas lie, if not in the
    engine's layers or on a device. sharded: True if each rank applies its part of the update.
    rollback: undoes a step that this rank refuses alone, or that a device refuses later.
    """

    communicator: Communicator
    replica: Replica
    average: bool
    rollback: Rollback
    bucket: FloatArray | None = None
    sharded: bool = False


class Exchange(ABC):
    """An update of all replicas from the deltas of all ranks, or none if a rank refuses."""

    steps = 0  # of this rank since all replicas were equal; counted if ranks step alone

    def __init__(self, setting: Setting) -> None:
        self._communicator = setting.communicator
        self._replica = setting.replica
        self._average = setting.average
        self._rollback = setting.rollback
        self.pace = Pace()  # of exchanges on the host

    @abstractmethod
    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Take part in an update; a collective call.

        ``samples`` is the number of samples behind this rank's deltas; 0: it has none. A rank that
        has ``finished`` only follows the others, and gets True if all have. Raises NotFiniteError.
        """

    @property
    def early(self) -> Early | None:
        """The exchange itself, if it starts while backward computes."""
        return None

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks at fault for an earlier refused step that has not been reported yet.

        ``everything``: wait for the outcome of all steps so far.
        """
        return self._replica.take_refused(everything)

    def raise_refused(self, everything: bool) -> None:
        """Raise NotFiniteError, on all ranks, if `take_refused` returns any."""
        if ranks := self.take_refused(everything):
            raise NotFiniteError(refusal("an earlier step was", ranks), ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state for `load_state_dict`; a collective call.

        Between steps, sums of deltas have none.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned for an exchange of the same settings."""

    def count_lasting(self, own: list[FloatArray]) -> None:  # noqa: B027
        """Record the loaded deltas that add up over steps; a collective call."""

    def restart(self) -> None:  # noqa: B027
        """Restart from replicas that have been made equal by other means."""

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:  # noqa: B027
        """Abort the exchange's own communicators: ranks that wait on them raise PeerLost."""

    def close(self) -> None:  # noqa: B027
        """Close the exchange's own communicators."""

    @traced("waiting")
    def _vote(self, own: Contribution) -> Agreement:
        """Return the agreement that follows from all ranks' contributions; a collective call."""
        communicator, pace = self._communicator, self.pace
        fields = [own.batch, int(own.finite), int(own.finished), pace.own()]
        if communicator.device == "cpu":
            everyone = np.empty((communicator.size, len(fields)), np.int64)
            communicator.all_gather(np.array(fields, np.int64), everyone)
        else:
            everyone = np.array(all_gather_object(communicator, fields))
        pace.end(everyone[:, 3].tolist())
        contributions = [
            Contribution(int(batch), bool(finite), bool(done))
            for batch, finite, done, _ in everyone
        ]
        return Agreement(contributions)

    def _end(self, samples: int, agreement: Agreement, culprit: str) -> bool:
        """End a step on the host by its agreement: apply the sums, unless a rank refuses.

        ``culprit`` is the first layer with an own delta that is NaN or infinite, or "".
        """
        if agreement.applies:
            self._replica.average_statistics(self._communicator, samples, agreement.batch)
            # This is last: if a rank is lost before, parameters are as they were.
            self._apply(agreement)
            self._replica.updated()
        if ranks := agreement.not_finite:
            raise NotFiniteError(refusal("step", ranks, culprit), ranks)
        return agreement.all_finished

    def _apply(self, agreement: Agreement) -> None:  # noqa: B027
        """Apply the sums, unless the exchange has applied them."""

    @traced("applying")
    def _apply_sums(self, bucket: FloatArray, agreement: Agreement) -> None:
        self._replica.parameters.apply(
            bucket, agreement.divisor(self._average), agreement.capped_as(self._average)
        )


class Alone(Exchange):
    """The exchange of a world of one, whose replica is on the host."""

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Apply this rank's deltas."""
        culprit = self._replica.step_alone(samples, 1)
        assert isinstance(culprit, str)  # The replica is on the host.
        if culprit:
            raise NotFiniteError(refusal("step", [0], culprit), [0])
        return finished


class InSharedMemory(Exchange):
    """An exchange over the memory of one host: one call of C++, and one collective."""

    def __init__(self, setting: Setting, communicator: ShmCommunicator, bucket: FloatArray) -> None:
        """Exchange through ``bucket``, which ``communicator`` has allocated."""
        super().__init__(setting)
        self._memory = communicator
        self.step = SharedStep(
            communicator, self._replica.on_host, bucket, self._average, self.pace
        )

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Agree, reduce and apply."""
        if timeline is None:
            return self._end(samples, *self.step(samples, finished))
        begin, waited = time.monotonic(), self._memory.seconds_waited
        agreement, culprit = self.step(samples, finished)
        end, middle = time.monotonic(), begin + self._memory.seconds_waited - waited
        timeline.add("waiting", begin, middle)  # The waits for other ranks, as one.
        timeline.add("reducing and applying", middle, end)
        return self._end(samples, agreement, culprit)


class Bucket(Exchange):
    """An exchange over any communicator: agree, reduce one bucket of all deltas, apply it."""

    def __init__(self, setting: Setting) -> None:
        """Pack deltas into a bucket, unless they lie in one."""
        super().__init__(setting)
        self._in_place = setting.bucket is not None
        self._bucket = setting.bucket

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Agree, reduce and apply."""
        culprit = self._replica.parameters.first_not_finite() if samples else ""
        agreement = self._vote(Contribution(samples, not culprit, finished))
        if agreement.applies:
            if self._bucket is None:
                self._bucket = host_bucket(self._communicator, self._replica.parameters.size)
            if samples == 0:
                self._bucket.fill(0)
            elif not self._in_place:
                self._replica.parameters.pack(self._bucket)
            self._reduce(self._bucket)
        return self._end(samples, agreement, culprit)

    @traced("reducing")
    def _reduce(self, bucket: FloatArray) -> None:
        self._communicator.all_reduce(bucket)

    def _apply(self, agreement: Agreement) -> None:
        assert self._bucket is not None
        self._apply_sums(self._bucket, agreement)


class Overlapped(Exchange):
    """An exchange of deltas in a bucket that reduces each part when it is complete.

    Backward completes the last layers first, so the parts run from the bucket's end. A part is
    reduced in place before the ranks agree, and is applied, or not, after that.
    """

    def __init__(self, setting: Setting, bucket: FloatArray) -> None:
        super().__init__(setting)
        self._bucket = bucket
        self._parameters = self._replica.on_host
        self._parts = parts_of(self._parameters.blocks, PART_BYTES)
        self._works: list[Work] = []
        self._culprit = ""

    @property
    def early(self) -> Overlapped:
        return self

    @traced("reducing")
    def discard(self) -> None:
        """Wait for the reductions of deltas that backward is about to replace."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._culprit = ""

    def start(self, begin: int) -> None:
        """Reduce the parts from ``begin`` on in the flat sequence, which are complete."""
        for first, end in self._parts[len(self._works) // 2 :]:
            if first < begin:
                return
            self._culprit = self._culprit or self._parameters.first_not_finite(first, end)
            self._reduce(first, end)

    def start_nothing(self) -> None:
        """Reduce zeros: this rank has no deltas for the next step, but others may have."""
        self.discard()
        self._bucket.fill(0)
        for first, end in self._parts:
            self._reduce(first, end)

    def _reduce(self, first: int, end: int) -> None:
        for half in self._bucket.reshape(2, -1):
            work = self._communicator.all_reduce(half[first:end], async_op=True)
            assert work is not None
            self._works.append(work)

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Reduce the remaining parts, agree and apply."""
        if samples:
            self.start(0)
        elif not self._works:
            self.start_nothing()
        culprit = self._culprit if samples else ""
        agreement = self._vote(Contribution(samples, not culprit, finished))
        self.discard()
        return self._end(samples, agreement, culprit)

    def _apply(self, agreement: Agreement) -> None:
        self._apply_sums(self._bucket, agreement)


class Queued(Exchange):
    """An exchange on a device, in place: a step goes into its queue, and the host does not wait.

    The agreement is gathered last: if an operation before it is aborted, the agreement is never
    complete, and nothing is applied. A later step reports a refused one.
    """

    def __init__(self, setting: Setting, queue: Callable[[Contribution], DeviceAgreement]) -> None:
        """Step by ``queue``; see `Replica.queue`."""
        super().__init__(setting)
        self._queue = queue

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Put the step into the device's queue; raise NotFiniteError for an earlier refused one."""
        self.raise_refused(everything=False)
        agreement = self._queue(Contribution(samples, True, finished))
        self._rollback.restore_if(agreement.refused)
        return finished and agreement.all_finished()


def parts_of(blocks: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return parts of the flat sequence, the last first: whole layers, at least ``size`` bytes."""
    layers = [begin for begin, _ in blocks[::2]]
    parts, end = [], sum(blocks[-1])
    for begin in reversed(layers):
        if 2 * 4 * (end - begin) >= size or begin == 0:
            parts.append((begin, end))
            end = begin
    return parts
