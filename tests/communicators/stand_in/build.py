"""Compile the stand-ins for libcuda and libnccl."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILER = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", "-pthread"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
LIMIT = 120.0


def build(folder: Path, *, omit: Sequence[str] = (), sanitize: bool = False) -> tuple[Path, Path]:
    """Return the paths of libnccl.so.2 and libcuda.so.1 in `folder`, without the symbols `omit`."""
    folder = folder.resolve()
    compiler = [*COMPILER, *WARNINGS, *(SANITIZERS if sanitize else [])]
    objects = [folder / "nccl.o", folder / "cuda.o"]
    commands = [
        [*compiler, "-c", str(SOURCES / f"{path.stem}.cpp"), "-o", str(path)] for path in objects
    ]
    for process in [subprocess.Popen(command) for command in commands]:
        assert process.wait(LIMIT) == 0, "the stand-ins do not compile"

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
