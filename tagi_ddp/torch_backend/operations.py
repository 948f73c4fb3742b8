"""What torch's operations are to communicators: flat memory, and work under way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from tagi_ddp.communicators.nccl.work import NcclWork


class Flat:
    """A tensor's elements as a flat tensor that a communicator takes: its memory, or a copy."""

    def __init__(self, tensor: Tensor, read: bool = True) -> None:
        """``read``: whether the elements are used, and not only written."""
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
        self.divisor = 1  # of what arrives, integers, whose quotients are truncated

    def arrives(self, data: Tensor) -> None:
        """Take what will be in ``data``."""
        self.data, self._copied = data, True

    def store(self) -> None:
        """Write what has arrived to the tensor, if it is not there."""
        if self.divisor != 1:
            self.data.div_(self.divisor, rounding_mode="trunc")
        if self._copied:
            self._target.copy_(self.data.view(self._target.shape))


class OperationWork(dist.Work):
    """What torch gets of operations under way."""

    def __init__(
        self,
        works: Sequence[Any],
        tensors: list[Tensor],
        flats: list[Flat],
    ) -> None:
        """Follow ``works``; when they are complete ``flats`` go to where they belong."""
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._tensors = tensors
        self._flats = flats
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the results are there; raise what has gone wrong.

        On a GPU: let what the current stream gets from now on come after them, as torch's NCCL
        does.
        """
        limit = timeout.total_seconds() if timeout else None  # torch's 0: no other limit
        with self._lock:
            while self._works:
                work = self._works[0]
                if isinstance(work, dist.Work):
                    work.wait(*(() if timeout is None else (timeout,)))
                elif isinstance(work, NcclWork):
                    work.settle(self._stream())
                else:
                    work.wait(limit)
                del self._works[0]
            while self._flats:
                self._flats.pop().store()
        return True

    def _stream(self) -> int | None:
        """Return who waits for results on a GPU: the current stream, whichever called; or None."""
        device = self._tensors[0].device
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None

    def is_completed(self) -> bool:
        """Tell whether the results are there, or it has failed."""
        done = all(
            work.is_completed() if isinstance(work, dist.Work) else work.done()
            for work in list(self._works)
        )
        if done and not any(tensor.is_cuda for tensor in self._tensors):
            with suppress(Exception):  # which `wait` raises again
                self.wait()  # only for what has arrived elsewhere
        return done

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        """Wait, and return a future of the tensors that is complete.

        Python cannot put an error into a future that C++, like DistributedDataParallel's, looks at:
        it is raised here.
        """
        self.wait()
        devices: list[int | str | torch.device] = [
            *{tensor.device for tensor in self._tensors if tensor.is_cuda}
        ]
        future: Future[list[Tensor]] = Future(devices=devices)
        future.set_result(self._tensors)
        return future


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Tell whether both are views of one memory."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
