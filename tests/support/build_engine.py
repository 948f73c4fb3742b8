"""Build the engine for the CPU from a checkout of its source; it needs g++ and pybind11.

    python tests/support/build_engine.py SOURCE FOLDER

FOLDER then holds pytagi and cutagi, and is to be the first in PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

# Programs, and code that the engine does not call, which does not compile without CUDA.
_LEFT_OUT = ("debugger", "derivative_calcul_cpu", "gated_residual_layer_cpu", "test_dataloader")
_FLAGS = ("-std=c++14", "-O2", "-fPIC", "-w")


def build(source: Path, folder: Path) -> None:
    """Compile the files of ``source`` that have changed since, and link them in ``folder``."""
    name = hashlib.blake2b(bytes(source), digest_size=4).hexdigest()  # another source, other files
    if not (source / "src" / "bindings").is_dir():
        sys.exit(
            f"{source} is no checkout of cuTAGI: set TAGI_DDP_CUTAGI_SOURCE to the path of one"
        )
    objects = folder / "objects" / name
    objects.mkdir(parents=True, exist_ok=True)
    include = [pybind11.get_include(), sysconfig.get_path("include"), str(source / "include")]
    files = [
        file
        for pattern in ("src/*.cpp", "src/bindings/*.cpp")
        for file in sorted(source.glob(pattern))
        if file.stem not in _LEFT_OUT
    ]

    def compile_one(file: Path) -> Path:
        target = objects / f"{file.stem}.o"
        if not target.exists() or target.stat().st_mtime < file.stat().st_mtime:
            flags = [*_FLAGS, *(f"-I{path}" for path in include)]
            subprocess.run(
                ["g++", *flags, "-c", file, "-o", target], check=True, cwd=source / "src"
            )
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = list(pool.map(compile_one, files))
    library = folder / f"cutagi{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(["g++", "-shared", "-pthread", *compiled, "-o", library], check=True)
    shutil.copytree(source / "pytagi", folder / "pytagi", dirs_exist_ok=True)
    # Now, as in tests the warnings of the compiler are errors.
    command = [sys.executable, "-W", "ignore", "-m", "compileall", "-q", folder / "pytagi"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
