"""The interface of all communicators: every collective of the package goes through it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Buffer = Any
"""A C-contiguous numpy array or torch tensor; its memory is used in place, its shape is ignored."""

ReduceOp = Literal["sum", "mean", "min", "max"]
"""The operation by which a reduction combines the ranks' numbers."""

DEFAULT_TIMEOUT = 300.0
"""The default limit of every wait for other ranks, in seconds."""


@runtime_checkable
class Work(Protocol):
    """An operation under way, as returned by ``async_op=True``."""

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation is complete; raise its error if it failed.

        ``timeout`` in seconds limits this wait; None waits as long as the operation may take. After
        the `Timeout` of a wait the operation continues, and may be waited for again.
        """
        ...

    def done(self) -> bool:
        """Return, without blocking, whether the operation is complete or has failed."""
        ...


@runtime_checkable
class Communicator(Protocol):
    """A group of ``size`` ranks that call the same operations in the same order.

    Rules for every operation:

    - Buffers are C-contiguous numpy arrays or torch tensors of float16, bfloat16, float32, float64
      or an 8- to 64-bit integer type, used in place, without copies on the caller's side, as flat
      sequences of elements. A wrong buffer or argument (type, dtype, contiguity, size, rank out of
      range) raises TypeError or ValueError that names the argument, before any communication.
    - A reduction keeps the dtype; 16-bit floats accumulate in float32; "mean" takes floats only.
      All ranks get the same bits.
    - An input is never written to, unless it is also the output.
    - Operations run in the order of the calls, asynchronous ones too. With ``async_op=True`` the
      call returns a `Work` at once, and the caller must not use the buffers until it is done.
    - ``timeout`` in seconds replaces the communicator's own for this operation. Every wait ends in
      success, or in `Timeout`, `PeerLost` or `Mismatch`, which name the operation, its sequence
      number, this rank and the ranks at fault. After any of these the communicator is broken: every
      later operation raises, on every rank.
    - After `close`, every operation raises a CommunicatorError that says so.
    """

    @property
    def rank(self) -> int:
        """This process's number in the group, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def backend(self) -> str:
        """ "single", "shm", "nccl", "mpi" or "gloo"."""
        ...

    @property
    def device(self) -> str:
        """The device of all buffers: "cpu" or "cuda:<index>"."""
        ...

    @property
    def timeout(self) -> float:
        """The default limit of every wait of this rank, in seconds; can be set."""
        ...

    @timeout.setter
    def timeout(self, seconds: float) -> None: ...

    def empty(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike = "float32"
    ) -> npt.NDArray[Any]:
        """Return zeros in host memory, which the ranks of a host share if they can.

        In shared memory collectives copy less: `all_reduce` in place, `reduce_scatter` from it,
        `all_gather` to it. All ranks of a host must then pass the same part of it. A collective
        call, with the same shape and dtype on all ranks.
        """
        ...

    def all_reduce(
        self,
        buffer: Buffer,
        op: ReduceOp = "sum",
        *,
        out: Buffer | None = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Reduce ``buffer`` over all ranks into ``out``, in place if ``out`` is None.

        ``out`` has the dtype and number of elements of ``buffer``, which are the same on all ranks.
        """
        ...

    def broadcast(
        self,
        buffer: Buffer,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every other rank."""
        ...

    def all_gather(
        self,
        buffer: Buffer,
        out: Buffer,
        counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Concatenate every rank's ``buffer``, in rank order, into ``out`` of every rank.

        ``counts[r]`` is the number of elements of rank r, the same list on all ranks; None:
        the same number for all.
        """
        ...

    def reduce_scatter(
        self,
        buffer: Buffer,
        out: Buffer,
        counts: Sequence[int] | None = None,
        op: ReduceOp = "sum",
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Reduce ``buffer`` over all ranks and write slice r of the result to rank r's ``out``.

        ``counts[r]`` is the number of elements of rank r's slice, slices in rank order; None: the
        same number for all.
        """
        ...

    def all_to_all(
        self,
        buffer: Buffer,
        out: Buffer,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Send ``send_counts[r]`` elements, in rank order, to each r; receive ``recv_counts[r]``.

        None: the same number for every rank. Rank b must expect as many from a as a sends to b.
        """
        ...

    def send(
        self,
        buffer: Buffer,
        dst: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Send ``buffer`` to rank ``dst``, which calls `recv`. May return before it arrives.

        Messages from one rank to another arrive in order; ``tag`` (32 bits) equals that of `recv`.
        """
        ...

    def recv(
        self,
        buffer: Buffer,
        src: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Work | None:
        """Receive into ``buffer`` what rank ``src`` sends: same dtype, size and tag."""
        ...

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return once every rank has called it."""
        ...

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Make a communicator per ``color``, ranks ordered by (``key``, rank); None joins none.

        A collective operation of all ranks. The new communicator must be closed, too.
        """
        ...

    def abort(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """Give up: every rank that waits, or calls later, raises `PeerLost` with ``reason``.

        The error blames ``ranks``; none: this one.
        """
        ...

    def check(self) -> None:
        """Raise the error that would end the next operation, if it is known; do not wait."""
        ...

    def close(self) -> None:
        """Leave the group and free what it holds; may be called again."""
        ...

    def __enter__(self) -> Communicator:
        """Return the communicator itself."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; if the block ended in an error, `abort` before."""
        ...


# Small Python values, as JSON: nothing that is received is ever run.


def all_gather_object(comm: Communicator, obj: Any) -> list[Any]:
    """Return every rank's ``obj``, in rank order: None, bools, numbers, texts, lists and dicts.

    Two collectives: the sizes, then the bytes. Values are sent as JSON, so tuples become lists, and
    keys texts. Other types raise TypeError on the rank that passes them.
    """
    of_device = getattr(comm, "all_gather_object", None)  # Its buffers cannot hold the host's.
    if of_device is not None:
        values: list[Any] = of_device(obj)
        return values
    data = np.frombuffer(json.dumps(obj).encode(), np.uint8)
    sizes = np.empty(comm.size, np.int64)
    comm.all_gather(np.array([data.size], np.int64), sizes)
    counts = sizes.tolist()
    gathered = np.empty(sum(counts), np.uint8)
    comm.all_gather(data, gathered, counts)
    return [json.loads(part.tobytes()) for part in np.split(gathered, np.cumsum(counts)[:-1])]
