"""MPI's library by mpi4py, loaded so that it fits the engine; `start` initializes it."""

from __future__ import annotations

import ctypes
import sys

from tagi_ddp.communicators.errors import Timeout
from tagi_ddp.communicators.operations import in_time
from tagi_ddp.engine.loader import LIBMPI, STUB, holds_other_mpi, loaded_libraries

if loaded_libraries().get(LIBMPI) == STUB and not holds_other_mpi():
    raise ImportError("no MPI library was found when the engine was loaded")

import mpi4py

if "mpi4py.MPI" not in sys.modules:
    # `start` initializes MPI, which may wait for other ranks. MPI ends with the process.
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True

from mpi4py import MPI  # This loads the library.

__all__ = ["MPI", "start"]


def start(where: str, timeout: float) -> None:
    """Start MPI unless it has been started; this waits for all ranks.

    ``timeout`` limits it, unless only this thread may use MPI. ``where`` begins an error's text.
    """
    if MPI.Is_initialized():
        return
    name = mpi4py.rc.thread_level if mpi4py.rc.threads else "single"
    level: int = getattr(MPI, f"THREAD_{name.upper()}")
    if level < MPI.THREAD_MULTIPLE:  # The script allows MPI on this thread only.
        MPI.Init_thread(level)
        return
    # ctypes, unlike mpi4py, lets other threads run meanwhile.
    library, provided = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    arguments = (None, None, ctypes.c_int(level), ctypes.byref(provided))
    late = Timeout(
        f"{where}: MPI did not start within {timeout:g} s: a rank has not called init, nor "
        "imported mpi4py.MPI. Look at the ranks' output; raise timeout= if they are only slow. "
        "End this process: MPI cannot be started again."
    )
    in_time(lambda: library.MPI_Init_thread(*arguments), timeout, late)
    for communicator in (MPI.COMM_WORLD, MPI.COMM_SELF):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py does so, too.
