"""Flat memory of tensors for communicators, and their operations in flight as torch's work."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tagi_ddp.communicators.communicator import Work
from tagi_ddp.communicators.nccl.work import NcclWork


class Flat:
    """A tensor's elements as a flat tensor that a communicator takes: its memory, or a copy."""

    def __init__(self, tensor: Tensor, read: bool = True) -> None:
        """Flatten ``tensor``; without ``read`` its elements are only written."""
        plain = tensor.detach()
        if plain.is_complex():
            plain = torch.view_as_real(plain)
        elif plain.dtype == torch.bool:
            plain = plain.view(torch.uint8)
        self._target = plain
        self._copied = not plain.is_contiguous()
        if self._copied:
            plain = plain.contiguous() if read else plain.new_empty(plain.shape)
        self.data = plain.view(-1)
        self.divisor = 1  # `store` divides integers by it, and truncates the quotients.

    def receive_in(self, data: Tensor) -> None:
        """Use ``data`` as the memory in which the result arrives."""
        self.data, self._copied = data, True

    def store(self) -> None:
        """Write the result to the tensor, if it has arrived elsewhere."""
        if self.divisor != 1:
            self.data.div_(self.divisor, rounding_mode="trunc")
        if self._copied:
            self._target.copy_(self.data.view(self._target.shape))


class OperationWork(dist.Work):
    """Operations in flight, as torch's work."""

    def __init__(
        self,
        works: Sequence[Work | dist.Work | None],
        tensors: Sequence[Tensor],
        flats: Sequence[Flat],
    ) -> None:
        """Keep ``works``; `wait` stores ``flats`` when they are complete."""
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._tensors, self._flats = list(tensors), list(flats)
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the results; raise the error of an operation that failed.

        On a GPU the current stream waits, and the host does not, as in torch's NCCL.
        """
        limit = timeout.total_seconds() if timeout else None  # torch's 0 means no other limit.
        with self._lock:
            while self._works:
                work = self._works[0]
                if isinstance(work, dist.Work):
                    work.wait(*(() if timeout is None else (timeout,)))
                elif isinstance(work, NcclWork):
                    work.order_before(self._stream())
                else:
                    work.wait(limit)
                del self._works[0]
            while self._flats:
                self._flats.pop().store()
        return True

    def _stream(self) -> int | None:
        """Return the current stream of the GPU, which waits for results; None on the host."""
        device = self._tensors[0].device
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None

    def is_completed(self) -> bool:
        """Return whether the operations are complete or have failed."""
        done = all(
            work.is_completed() if isinstance(work, dist.Work) else work.done()
            for work in list(self._works)
        )
        if done and not any(tensor.is_cuda for tensor in self._tensors):
            with suppress(Exception):  # The caller's `wait` raises it again.
                self.wait()  # It only stores results that have arrived elsewhere.
        return done

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        """Wait, and return a future of the tensors that is complete.

        An error is raised here, because Python cannot set it in a future that C++ code, like
        DistributedDataParallel's, reads.
        """
        self.wait()
        devices: list[int | str | torch.device] = [
            *{tensor.device for tensor in self._tensors if tensor.is_cuda}
        ]
        future: Future[list[Tensor]] = Future(devices=devices)
        future.set_result(self._tensors)
        return future


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether both are views of one memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def all_gather_values(value: Any) -> list[Any]:
    """Return every rank's ``value``, as `communicators.all_gather_object` does; collective.

    It runs on torch's default group, by JSON: torch itself would unpickle the values.
    """
    device = "cpu" if "cpu:" in dist.get_backend_config() else "cuda"
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device))
    counts = [int(size) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    pairs = zip(parts, counts, strict=True)
    return [json.loads(part[:count].cpu().numpy().tobytes()) for part, count in pairs]
