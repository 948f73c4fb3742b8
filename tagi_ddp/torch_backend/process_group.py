"""torch.distributed's collectives on the package's communicators: the backend "tagi_ddp"."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tagi_ddp.communicators import BackendUnavailable, Communicator, all_gather_object, init
from tagi_ddp.communicators.nccl import create
from tagi_ddp.communicators.network import rendezvous as gloo
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.environment import detect, offers_mpi, setting
from tagi_ddp.optim.sparse import sparse_sum
from tagi_ddp.torch_backend.operations import Flat, OperationWork, share_memory

NAME = "tagi_ddp"
_BACKENDS = ("auto", "shm", "mpi", "gloo")
_REDUCTIONS = {"SUM": "sum", "AVG": "mean", "MIN": "min", "MAX": "max"}


class ProcessGroup(dist.ProcessGroup):
    """A group of torch.distributed whose collectives run on a communicator.

    Tensors on the CPU use it. Tensors on a GPU use NCCL, for which their stream waits, not the
    host. Any may be a view. Reductions are sum, average, minimum and maximum; bools and complex
    numbers are sent as the integers and floats in their memory. Sparse tensors (COO) can only be
    summed and averaged, by a call that waits.
    """

    def __init__(self, communicator: Communicator) -> None:
        """Make a group of the ranks of ``communicator``, which is closed with the group."""
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self._on_device: Communicator | None = None

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    # torch keeps the name in a group's backend objects, which this group does not have.

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """The name by which torch finds the group."""
        return self._name

    # --- reductions ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce each tensor in place."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        if any(tensor.is_sparse for tensor in tensors):
            return self._allreduce_sparse(tensors, opts)
        flats = [Flat(tensor) for tensor in tensors]
        works = [
            self._for(flat.data).all_reduce(flat.data, self._reduction(opts, flat), async_op=True)
            for flat in flats
        ]
        return OperationWork(works, tensors, flats)

    def _allreduce_sparse(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        name = _name_of(opts)
        if name not in ("SUM", "AVG"):
            raise ValueError(f"op must be SUM or AVG for sparse tensors, got {name}")
        for tensor in tensors:
            result = sparse_sum(tensor, self._for(tensor))
            tensor.copy_(result / self.size() if name == "AVG" else result)
        return OperationWork([], tensors, [])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduce each tensor in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """Reduce each tensor, on the root in place; others keep theirs."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        root = self.rank() == opts.rootRank
        works, flats = [], []
        for tensor in tensors:
            flat = Flat(tensor)
            op = self._reduction(opts, flat)
            result = flat.data if root else torch.empty_like(flat.data)
            works.append(self._for(flat.data).all_reduce(flat.data, op, out=result, async_op=True))
            flats += [flat] if root else []
        return OperationWork(works, tensors, flats)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce lists of tensors, one for each rank; each rank gets its own."""
        works, flats = [], []
        for output, parts in zip(outputs, inputs, strict=True):
            flat = Flat(output, read=False)
            op = self._reduction(opts, flat)
            whole = torch.cat([Flat(part).data for part in parts])
            counts = [Flat(part).data.numel() for part in parts]
            works.append(
                self._for(whole).reduce_scatter(whole, flat.data, counts, op, async_op=True)
            )
            flats.append(flat)
        return OperationWork(works, outputs, flats)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """Reduce one tensor; each rank gets an equal slice."""
        flat, source = Flat(output, read=False), Flat(whole).data
        if share_memory(output, whole):  # Communicators do not allow this.
            flat.receive_in(torch.empty_like(flat.data))
        op = self._reduction(opts, flat)
        work = self._for(source).reduce_scatter(source, flat.data, None, op, async_op=True)
        return OperationWork([work], [output], [flat])

    reduce_scatter_single = _reduce_scatter_base
    """The name that newer releases of torch call."""

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors; each rank gets an equal slice of each."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self._reduce_scatter_base(*pair, opts) for pair in pairs]
        return OperationWork(works, outputs, [])

    # --- copies -------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        """Copy the root's tensors to all ranks."""
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors
        flats = [Flat(tensor) for tensor in tensors]
        works = [
            self._for(flat.data).broadcast(flat.data, opts.rootRank, async_op=True)
            for flat in flats
        ]
        return OperationWork(works, tensors, flats)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Copy every rank's tensor into the lists of all; sizes may differ between ranks."""
        works, flats = [], []
        for parts, tensor in zip(outputs, inputs, strict=True):
            source, arriving = Flat(tensor).data, [Flat(part, read=False) for part in parts]
            counts = [flat.data.numel() for flat in arriving]
            whole = source.new_empty(sum(counts))
            works.append(self._for(source).all_gather(source, whole, counts, async_op=True))
            for flat, data in zip(arriving, whole.split(counts), strict=True):
                flat.receive_in(data)
            flats += arriving
        return OperationWork(works, [part for parts in outputs for part in parts], flats)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        """Put every rank's tensor into one, in rank order."""
        flat, source = Flat(output, read=False), Flat(tensor).data
        if share_memory(output, tensor):
            source = source.clone()
        work = self._for(source).all_gather(source, flat.data, async_op=True)
        return OperationWork([work], [output], [flat])

    all_gather_single = _allgather_base
    """The name that newer releases of torch call."""

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Put every rank's tensors into one each, in rank order."""
        pairs = zip(outputs, inputs, strict=True)
        return OperationWork([self._allgather_base(*pair) for pair in pairs], outputs, [])

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        """Copy every rank's tensor into the root's list."""
        if self.rank() != opts.rootRank:
            outputs = [[torch.empty_like(tensor)] * self.size() for tensor in inputs]
        return self.allgather(outputs, inputs)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any
    ) -> dist.Work:
        """Send each rank its tensor of the root's list."""
        root = opts.rootRank
        empty = [output.new_empty(0) for output in outputs for _ in range(self.size())]
        sent = inputs[0] if self.rank() == root else empty
        received = [outputs[0] if rank == root else empty[0] for rank in range(self.size())]
        return self.alltoall(received, sent)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send slices of the first dimension to the ranks; no splits: equal slices."""
        flat, source = Flat(output, read=False), Flat(tensor).data
        work = self._for(source).all_to_all(
            source,
            flat.data,
            _elements(input_splits, tensor, source),
            _elements(output_splits, output, flat.data),
            async_op=True,
        )
        return OperationWork([work], [output], [flat])

    all_to_all_single = alltoall_base
    """The name that newer releases of torch call."""

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Send a tensor to each rank; sizes may differ."""
        flats = [Flat(output, read=False) for output in outputs]
        sources = [Flat(tensor).data for tensor in inputs]
        received = [flat.data.numel() for flat in flats]
        whole = flats[0].data.new_empty(sum(received))
        work = self._for(whole).all_to_all(
            torch.cat(sources), whole, [s.numel() for s in sources], received, async_op=True
        )
        for flat, data in zip(flats, whole.split(received), strict=True):
            flat.receive_in(data)
        return OperationWork([work], outputs, flats)

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        """Send each tensor to a rank."""
        flats = [Flat(tensor) for tensor in tensors]
        works = [
            self._for(flat.data, connects=False).send(flat.data, rank, tag, async_op=True)
            for flat in flats
        ]
        return OperationWork(works, tensors, [])

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> dist.Work:
        """Receive each tensor from a rank."""
        flats = [Flat(tensor, read=False) for tensor in tensors]
        works = [
            self._for(flat.data, connects=False).recv(flat.data, rank, tag, async_op=True)
            for flat in flats
        ]
        return OperationWork(works, tensors, flats)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Raise ValueError: communicators receive only from a rank that is named."""
        raise ValueError("src must be a rank for the backend 'tagi_ddp', got None")

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have called this."""
        for communicator in self._communicators():
            communicator.barrier()
        return OperationWork([], [], [])

    # --- the end ------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group."""
        for communicator in self._communicators():
            communicator.close()

    def abort(self) -> None:
        """Abort the group: ranks that wait get PeerLost."""
        for communicator in self._communicators():
            communicator.abort("torch.distributed aborted the group")

    # --- communicators ------------------------------------------------------------------------

    def _communicators(self) -> list[Communicator]:
        return [each for each in (self._on_device, self.communicator) if each is not None]

    def _for(self, tensor: Tensor, connects: bool = True) -> Communicator:
        """Return the communicator for ``tensor``; the first call for a GPU connects NCCL's."""
        if not tensor.is_cuda:
            return self.communicator
        if self._on_device is None:
            if not connects:
                raise RuntimeError(
                    "the first operation on GPUs connects all ranks of the group, and a message "
                    "is between two: call all_reduce on the GPU before"
                )
            self._on_device = create(
                self.rank(),
                self.size(),
                (tensor.device.index, 0),
                self.communicator.timeout,
                lambda own: all_gather_object(self.communicator, own),
            )
        return self._on_device

    def _reduction(self, opts: Any, result: Flat) -> Any:
        """Return the communicator's name of torch's reduction; it does not average integers."""
        name = _name_of(opts)
        if name not in _REDUCTIONS:
            raise ValueError(
                f"op must be one of {', '.join(_REDUCTIONS)} for the backend 'tagi_ddp', got {name}"
            )
        if name == "AVG" and not result.data.is_floating_point():
            result.divisor = self.size()
            return "sum"
        return _REDUCTIONS[name]


def _name_of(opts: Any) -> str:
    """Return torch's name of a reduction, like "SUM"."""
    asked = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    return str(getattr(asked, "op", asked)).rpartition(".")[2]


def _elements(splits: Sequence[int], tensor: Tensor, flat: Tensor) -> list[int] | None:
    """Return the number of elements of each rank's rows; None: all ranks have equally many."""
    if not splits:
        return None
    row = flat.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [count * row for count in splits]


# The backend of ``torch.distributed.init_process_group("tagi_ddp")``.


def register() -> None:
    """Register the backend with torch."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> ProcessGroup:
    """Return the group of the ranks that share the store; no others call this."""
    return ProcessGroup(_connect(store, rank, size, timeout.total_seconds()))


def _connect(store: dist.Store, rank: int, size: int, timeout: float) -> Communicator:
    backend = setting("TORCH_CARRIER") or "auto"
    if backend not in _BACKENDS:
        raise ValueError(
            f"TAGI_DDP_TORCH_CARRIER must be one of {', '.join(_BACKENDS)}, got {backend!r}"
        )
    if size == 1:
        return SingleCommunicator(timeout)
    if rank == 0:
        store.set("job", secrets.token_hex(8))
    store.set(f"host {rank}", socket.gethostname())
    hosts = {store.get(f"host {other}") for other in range(size)}
    if backend == "shm" or (backend == "auto" and len(hosts) == 1):
        return init("shm", rank, size, job=store.get("job").decode(), timeout=timeout)
    environment = detect()
    if backend == "mpi" or (backend == "auto" and offers_mpi(environment)):
        if size == environment.world_size:
            return init("mpi", rank, size, timeout=timeout)
        raise BackendUnavailable(
            f"a group of {size} of MPI's {environment.world_size} ranks on several hosts: "
            "set TAGI_DDP_TORCH_CARRIER=gloo"
        )
    return gloo.connect(store, rank, size, timeout)
