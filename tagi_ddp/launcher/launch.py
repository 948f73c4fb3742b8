"""`launch`: a function on several processes of this host, from a script or a notebook."""

from __future__ import annotations

import linecache
import os
import pickle
import stat
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, TypeVar

from tagi_ddp.checks import integer, seconds
from tagi_ddp.launcher.pickling import dumps
from tagi_ddp.launcher.rank_output import standard_descriptors
from tagi_ddp.launcher.supervisor import supervise

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    nprocs: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Call ``fn(*args, **kwargs)`` on ``nprocs`` new Python processes, the ranks, and wait for all.

    The ranks are fresh interpreters, never forks. ``fn`` is sent by cloudpickle: closures, lambdas
    and functions of a script or a notebook cell work, with copies of what they refer to. In ``fn``,
    `DDPConfig.from_env` and torch.distributed (``env://``) find the rank. OMP_NUM_THREADS is set to
    cores / nprocs unless it is set already. The ranks' output appears here line by line, behind the
    rank's number. When this returns or raises, the ranks have ended, with all processes that they
    started, except those that left their process group (``start_new_session``). If this process is
    killed, the ranks end, but not the processes that they started.

    Args:
        fn: the function; its result must be picklable.
        nprocs: number of ranks; may exceed the number of cores.
        args: positional arguments, the same for all ranks.
        kwargs: keyword arguments, the same for all ranks.
        timeout: seconds after which the ranks are ended; None: no limit.

    Returns:
        the ranks' results, in rank order.

    Raises:
        OSError: the ranks' output cannot be written; all were ended.
        LaunchError: a rank failed. The text has the first such rank's number and traceback, or the
            signal or exit status that ended it; the other ranks are ended within seconds.
        TimeoutError: ``timeout`` is over; the text names the ranks that were still running.
        TypeError: ``fn`` or an argument cannot be pickled, or an argument is of the wrong type.
        ValueError: ``nprocs`` or ``timeout`` is out of range.
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function, got {fn!r}")
    nprocs = integer("nprocs", nprocs, 1)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise TypeError(f"args must be a tuple or list of arguments, got {args!r}")
    if not isinstance(kwargs, Mapping | None):
        raise TypeError(f"kwargs must be a dict of keyword arguments or None, got {kwargs!r}")
    if timeout is not None:
        timeout = seconds("timeout", timeout)
    call = _pickled(fn, tuple(args), dict(kwargs or {}))
    # Tracebacks need the source text of functions without a file, such as notebook cells.
    sources = {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }
    with standard_descriptors(), _memory_file() as file:
        pickle.dump((sources, call), file)
        file.flush()
        payload = file.fileno()
        results = supervise(["call", str(payload)], nprocs, timeout, pass_fds=[payload])
    return [pickle.loads(result) for result in results if result is not None]


def _memory_file() -> BinaryIO:
    """Return a file in memory; only this user can open it, through /proc."""
    descriptor = os.memfd_create("tagi_ddp.launch")
    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
    return open(descriptor, "wb")


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return dumps((fn, args, kwargs))
    except Exception as error:
        parts = {"fn": fn}
        parts |= {f"args[{i}]": value for i, value in enumerate(args)}
        parts |= {f"kwargs[{key!r}]": value for key, value in kwargs.items()}
        name = next((name for name, part in parts.items() if not _can_pickle(part)), "the call")
        raise TypeError(
            f"{name} cannot be sent to the ranks: {error}. Make objects that cannot be pickled (a "
            "pytagi Sequential, an open file, a lock, a communicator) inside fn, and let fn and "
            "its arguments refer to plain data only, such as numpy arrays and settings"
        ) from error


def _can_pickle(part: object) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True
