"""Compile the stand-ins for libcuda and libnccl.

What the libraries do is chosen by environment variables, which they read at each call:

- TAGI_DDP_STAND_IN_DEVICES: how many devices there are; 4 by default.
- TAGI_DDP_STAND_IN_RANK: the rank of this process, for faults of calls without a communicator.
- TAGI_DDP_STAND_IN_FAULT: what fails, as a list with commas of

  - ``ncclSend=2``: the call returns the code; any function of both libraries.
  - ``ncclSend:hang``: what the call starts does not end before an abort; operations,
    ncclCommInitRankConfig and ncclCommFinalize.
  - ``ncclSend:async=6``: like ``hang``, and ncclCommGetAsyncError reports the code.
  - ``ncclSend:progress``: ncclCommGetAsyncError says "in progress" until an abort; operations.
  - ``ncclGetVersion:value=21403``: the answer; also cuDriverGetVersion.
  - ``remote``: operations that lose a rank report a remote error, instead of nothing.

  each, if need be, followed by ``@1``, on rank 1 only, and ``#3``, from the third call on since the
  variable changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
OBJECTS = SOURCES.parents[2] / "build" / "stand_in"
COMPILER = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
LIMIT = 120.0


def build(folder: Path, *, omit: Sequence[str] = (), sanitize: bool = False) -> tuple[Path, Path]:
    """Return the paths of libnccl.so.2 and libcuda.so.1 in `folder`, without the symbols `omit`."""
    folder = folder.resolve()
    compiler = [*COMPILER, *WARNINGS, *(SANITIZERS if sanitize else [])]
    objects = compiled(compiler)
    script = folder / "symbols.map"
    hidden = "".join(f" {name};" for name in omit)
    script.write_text(f"{{ global: cu*; nccl*; standIn*; local: *;{hidden} }};\n")
    # Never unloaded: threads of streams outlive the communicator that closes the library.
    linker = [*compiler, "-shared", f"-Wl,-z,nodelete,--version-script={script}"]
    nccl, cuda = folder / "libnccl.so.2", folder / "libcuda.so.1"
    # libcuda is needed by its path, not by a soname: a real one in the process cannot take its
    # place.
    for command in (
        [*linker, str(objects[1]), "-o", str(cuda)],
        [*linker, "-Wl,-soname,libnccl.so.2", str(objects[0]), str(cuda), "-o", str(nccl)],
    ):
        subprocess.run(command, check=True, timeout=LIMIT)
    return nccl, cuda


def compiled(compiler: list[str]) -> list[Path]:
    """Return the object files of libnccl and libcuda, compiled once for all tests of this clone."""
    sources = sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])
    texts = [*(path.read_text() for path in sources), *compiler]
    folder = OBJECTS / hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / "nccl.o", folder / "cuda.o"]
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if not done.exists():
            commands = [
                [*compiler, "-c", str(SOURCES / f"{path.stem}.cpp"), "-o", str(path)]
                for path in objects
            ]
            for process in [subprocess.Popen(command) for command in commands]:
                assert process.wait(LIMIT) == 0, "the stand-ins do not compile"
            done.touch()
    return objects
