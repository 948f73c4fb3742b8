# The types in the stub of functions that take or return Python objects. nanobind's documentation
# describes the form ("Pattern files").

_backend.ShmCommunicator.all_reduce:
    \from tagi_ddp.communicators.communicator import Buffer, ReduceOp
    def all_reduce(self, buffer: Buffer, op: ReduceOp = ..., *, out: Buffer | None = None, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.broadcast:
    def broadcast(self, buffer: Buffer, root: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.all_gather:
    def all_gather(self, buffer: Buffer, out: Buffer, counts: Sequence[int] | None = None, *, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.reduce_scatter:
    def reduce_scatter(self, buffer: Buffer, out: Buffer, counts: Sequence[int] | None = None, op: ReduceOp = ..., *, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.all_to_all:
    def all_to_all(self, buffer: Buffer, out: Buffer, send_counts: Sequence[int] | None = None, recv_counts: Sequence[int] | None = None, *, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.send:
    def send(self, buffer: Buffer, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.recv:
    def recv(self, buffer: Buffer, src: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Work | None: ...

_backend.ShmCommunicator.barrier:
    def barrier(self, *, timeout: float | None = None) -> None: ...

_backend.ShmCommunicator.split:
    def split(self, color: int | None, key: int = 0) -> ShmCommunicator | None: ...

_backend.ShmCommunicator.empty:
    \from typing import Any
    \from numpy.typing import DTypeLike
    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = ...) -> NDArray[Any]:
        \doc

_backend.ShmCommunicator.__enter__:
    def __enter__(self) -> ShmCommunicator: ...

_backend.ShmCommunicator.__exit__:
    \from types import TracebackType
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

_backend.NcclRank.group:
    \from collections.abc import Callable
    def group(self, stream: int | None, calls: Callable[[], None]) -> NcclOperation:
        \doc

_backend.EngineVectors.view:
    def view(self, name: str) -> NDArray[numpy.float32]:
        \doc

_backend.batch_norm_statistics:
    def batch_norm_statistics(address: int) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32], float, float, NDArray[numpy.uint8]]:
        \doc

_backend.lstm_series:
    def lstm_series(address: int) -> tuple[NDArray[numpy.int32], int, list[NDArray[numpy.float32]]]:
        \doc

_backend.linear_series:
    def linear_series(address: int) -> tuple[NDArray[numpy.int32], int]:
        \doc

_backend.hidden_states:
    def hidden_states(address: int) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32], NDArray[numpy.float32]]:
        \doc

_backend.delta_states:
    def delta_states(address: int) -> tuple[NDArray[numpy.float32], NDArray[numpy.float32]]:
        \doc

_backend.Parameters.blocks:
    @property
    def blocks(self) -> list[tuple[int, int]]:
        \doc

_backend.Parameters.rows:
    @property
    def rows(self) -> list[int]:
        \doc

_backend.CAP_FACTORS:
    CAP_FACTORS: tuple[tuple[int, float], ...]
