"""Compile the stand-ins for libcuda and libnccl."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def build(folder: Path, *, omit: Sequence[str] = (), sanitize: bool = False) -> tuple[Path, Path]:
    """Return the paths of libnccl.so.2 and libcuda.so.1 in `folder`, without the symbols `omit`."""
    script = folder / "stand_in.map"
    hidden = "".join(f" {name};" for name in omit)
    script.write_text(f"{{ global: cu*; nccl*; standIn*; local: *;{hidden} }};\n")
    # Threads of streams outlive the communicator that closes the library.
    flags = [*FLAGS, f"-Wl,-z,nodelete,--version-script={script}"]
    if sanitize:
        flags += SANITIZERS
    # Named by its path, not by a soname: a real libcuda in the process does not take its place.
    cuda, nccl = folder.resolve() / "libcuda.so.1", folder.resolve() / "libnccl.so.2"
    compile_library([*flags, str(SOURCES / "cuda.cpp")], cuda)
    compile_library(
        [*flags, str(SOURCES / "nccl.cpp"), str(cuda), "-Wl,-soname,libnccl.so.2"], nccl
    )
    return nccl, cuda


def compile_library(arguments: Sequence[str], library: Path) -> None:
    subprocess.run(["g++", *arguments, "-o", str(library)], check=True, timeout=120)
