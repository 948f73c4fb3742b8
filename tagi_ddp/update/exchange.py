"""What happens at `step`: all ranks agree, reduce the deltas, and apply the same update."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tagi_ddp._backend import Agreement, Contribution, Parameters, ShmCommunicator, update
from tagi_ddp.communicators import Communicator, Work, all_gather_object
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.replica.protocol import QueuedAgreement, Replica
from tagi_ddp.replica.staging import host_bucket
from tagi_ddp.trace.timeline import timeline, traced
from tagi_ddp.update.not_finite import NotFiniteError, refusal

# Between hosts, two or more parts of this size are reduced while backward goes on: 6 to 22 % less
# time for a step over emulated links of 1 and 5 Gbit/s, more than with 1 or 16 MB. On one host it
# costs more time of the cores than it hides.
PART_BYTES = 4 << 20


@dataclass(frozen=True)
class Setting:
    """What an exchange is made for.

    average: whether deltas are averaged, else summed. bucket: where the deltas lie, if not in the
    engine's layers or on a device. sharded: whether each rank applies its part of the update.
    rollback: what undoes a step that this rank refuses alone, or that a device finds refused later.
    """

    communicator: Communicator
    replica: Replica
    average: bool
    rollback: Rollback
    bucket: FloatArray | None = None
    sharded: bool = False


class Exchange(ABC):
    """Makes one update of all replicas from the deltas of all ranks, or none if a rank refuses."""

    steps = 0  # of this rank since all replicas were equal; counted where ranks step alone

    def __init__(self, setting: Setting) -> None:
        self._communicator = setting.communicator
        self._replica = setting.replica
        self._average = setting.average
        self._rollback = setting.rollback

    @abstractmethod
    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Take part in an update; a collective call.

        ``samples`` are those behind this rank's deltas, 0: it has none. One that has ``finished``
        only follows the others; to it this tells whether all ranks do. Raises NotFiniteError.
        """

    @property
    def early(self) -> Overlapped | None:
        """Itself, if it begins while backward computes."""
        return None

    def take_refused(self, everything: bool) -> list[int]:
        """Return the ranks at fault, if an earlier step was refused and nobody has been told.

        ``everything``: wait for the outcome of all steps so far.
        """
        return self._replica.take_refused(everything)

    def raise_refused(self, everything: bool) -> None:
        """Raise NotFiniteError, on all ranks, where `take_refused` returns some."""
        if ranks := self.take_refused(everything):
            raise NotFiniteError(refusal("an earlier step was", ranks), ranks)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs to go on from here, on this rank; a collective call.

        Between steps, sums of deltas need nothing.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from where `state_dict` was called, by an exchange of the same settings."""

    def count_lasting(self, own: list[FloatArray]) -> None:  # noqa: B027
        """Take note of deltas that add up over steps, which were loaded; a collective call."""

    def restart(self) -> None:  # noqa: B027
        """Tell that the replicas have been made equal by other means."""

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:  # noqa: B027
        """Let ranks know that wait on communicators of the exchange's own."""

    def close(self) -> None:  # noqa: B027
        """Close communicators of its own."""


class HostExchange(Exchange):
    """An exchange by the host, which knows at once what the ranks agree on."""

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Agree, exchange and apply, then average running statistics, unless a rank refuses."""
        culprit = self._first_not_finite() if samples else ""
        agreement = self._exchange(Contribution(samples, not culprit, finished))
        if agreement.applies:
            self._replica.average_statistics(self._communicator, samples, agreement.batch)
            # The last, so that parameters are as they were where a rank is lost before.
            self._apply(agreement)
            self._replica.updated()
        if ranks := agreement.not_finite:
            raise NotFiniteError(refusal("step", ranks, culprit), ranks)
        return agreement.all_finished

    def _first_not_finite(self) -> str:
        """Return the name of the first layer with an own delta that is NaN or infinite, or ""."""
        return self._replica.parameters.first_not_finite()

    @abstractmethod
    def _exchange(self, own: Contribution) -> Agreement:
        """Return what the ranks agree on; the deltas are summed if that allows the update."""

    def _apply(self, agreement: Agreement) -> None:
        """Apply the update, unless that is a part of the exchange."""

    @traced("applying")
    def _apply_sums(self, bucket: FloatArray, agreement: Agreement) -> None:
        self._replica.parameters.apply(
            bucket, agreement.divisor(self._average), agreement.cap(self._average)
        )


class InMemory(HostExchange):
    """An exchange in which C++ works on the parameters, in the host's memory."""

    @property
    def _parameters(self) -> Parameters:
        parameters = self._replica.memory
        assert parameters is not None
        return parameters


class Alone(Exchange):
    """A world of one, whose replica is on the host."""

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Apply the own deltas."""
        culprit = self._replica.step_alone(samples, 1)
        assert isinstance(culprit, str)  # of a replica on the host
        if culprit:
            raise NotFiniteError(refusal("step", [0], culprit), [0])
        return finished


class Fused(InMemory):
    """Over shared memory, in cache-sized chunks, in one call."""

    def __init__(self, setting: Setting, communicator: ShmCommunicator) -> None:
        """Exchange over ``communicator``."""
        super().__init__(setting)
        self._memory = communicator

    def _exchange(self, own: Contribution) -> Agreement:
        return shown_in_memory(
            self._memory, partial(update, self._memory, self._parameters, own, self._average)
        )


class Bucket(HostExchange):
    """Over any communicator: agree, reduce one bucket of all deltas, apply it."""

    def __init__(self, setting: Setting) -> None:
        """Pack deltas into a bucket, unless they lie in one."""
        super().__init__(setting)
        self._in_place = setting.bucket is not None
        self._bucket = setting.bucket

    def _exchange(self, own: Contribution) -> Agreement:
        agreement = vote(self._communicator, own)
        if not agreement.applies:
            return agreement
        if self._bucket is None:
            self._bucket = host_bucket(self._communicator, self._replica.parameters.size)
        if own.batch == 0:
            self._bucket.fill(0)
        elif not self._in_place:
            self._replica.parameters.pack(self._bucket)
        self._reduce(self._bucket)
        return agreement

    @traced("reducing")
    def _reduce(self, bucket: FloatArray) -> None:
        self._communicator.all_reduce(bucket)

    def _apply(self, agreement: Agreement) -> None:
        assert self._bucket is not None
        self._apply_sums(self._bucket, agreement)


class Overlapped(InMemory):
    """Over any communicator, for deltas that lie in a bucket: reduce each part when it is complete.

    Backward completes the last layers first, so the parts run from the bucket's end. A part is
    reduced in place, before the ranks agree: it is applied, or not, after that.
    """

    def __init__(self, setting: Setting, bucket: FloatArray) -> None:
        super().__init__(setting)
        self._bucket = bucket
        self._parts = parts_of(self._parameters, PART_BYTES)
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
        """Reduce the parts from ``begin`` on, in the flat sequence: they are what they will be."""
        for first, end in self._parts[len(self._works) // 2 :]:
            if first < begin:
                return
            self._culprit = self._culprit or self._parameters.first_not_finite(first, end)
            self._reduce(first, end)

    def start_nothing(self) -> None:
        """Reduce zeros, for the ranks that have deltas; this one has none for the next step."""
        self.discard()
        self._bucket.fill(0)
        for first, end in self._parts:
            self._reduce(first, end)

    def _reduce(self, first: int, end: int) -> None:
        for half in self._bucket.reshape(2, -1):
            work = self._communicator.all_reduce(half[first:end], async_op=True)
            assert work is not None
            self._works.append(work)

    def _first_not_finite(self) -> str:
        self.start(0)
        return self._culprit

    def _exchange(self, own: Contribution) -> Agreement:
        if not self._works:
            self.start_nothing()
        agreement = vote(self._communicator, own)
        self.discard()
        return agreement

    def _apply(self, agreement: Agreement) -> None:
        self._apply_sums(self._bucket, agreement)


class Queued(Exchange):
    """On a device, in place: a step is put into its queue, and the host does not wait.

    What the ranks agree on comes last: if an operation before it was aborted it is never complete,
    and then nothing is applied. A refused step is told by a later one.
    """

    def __init__(self, setting: Setting, queue: Callable[[Contribution], QueuedAgreement]) -> None:
        """Step by ``queue``; see `Replica.queue`."""
        super().__init__(setting)
        self._queue = queue

    def __call__(self, samples: int, finished: bool = False) -> bool:
        """Put the step into the device's queue; raise what earlier ones have left to tell."""
        self.raise_refused(everything=False)
        agreement = self._queue(Contribution(samples, True, finished))
        self._rollback.restore_if(agreement.refused)
        return finished and agreement.all_finished()


def parts_of(parameters: Parameters, size: int) -> list[tuple[int, int]]:
    """Return parts of the flat sequence, the last first: whole layers, at least ``size`` bytes."""
    layers = [begin for begin, _ in parameters.blocks[::2]]
    parts, end = [], parameters.size
    for begin in reversed(layers):
        if 2 * 4 * (end - begin) >= size or begin == 0:
            parts.append((begin, end))
            end = begin
    return parts


def shown_in_memory(memory: ShmCommunicator, exchange: Callable[[], Agreement]) -> Agreement:
    """Return what ``exchange`` does; a timeline shows its waits for other ranks first, as one."""
    if timeline is None:
        return exchange()
    begin, waited = time.monotonic(), memory.seconds_waited
    agreement = exchange()
    end, middle = time.monotonic(), begin + memory.seconds_waited - waited
    timeline.add("waiting", begin, middle)
    timeline.add("reducing and applying", middle, end)
    return agreement


@traced("waiting")
def vote(communicator: Communicator, own: Contribution) -> Agreement:
    """Return what follows from the contributions of all ranks; a collective call."""
    words = [own.batch, int(own.finite), int(own.finished)]
    if communicator.device == "cpu":
        everyone = np.empty((communicator.size, len(words)), np.int64)
        communicator.all_gather(np.array(words, np.int64), everyone)
    else:
        everyone = np.array(all_gather_object(communicator, words))
    return Agreement(
        [Contribution(int(batch), bool(finite), bool(done)) for batch, finite, done in everyone]
    )
