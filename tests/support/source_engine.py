"""Builds the engine from a checkout of its source, for the CPU.

``python tests/support/source_engine.py CHECKOUT FOLDER`` writes the packages cutagi and pytagi into
FOLDER, which PYTHONPATH puts in front of the engine's wheel. It needs g++ and pybind11, but neither
MPI nor NCCL. Files that are up to date are not compiled again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ["-std=c++14", "-O2", "-fPIC", "-fvisibility=default", "-pthread", "-w"]
# Files that the engine's own build leaves out, and its tests.
LEFT_OUT = ("debugger", "derivative_calcul_cpu", "gated_residual_layer_cpu", "test_dataloader")


def build(checkout: Path, folder: Path) -> None:
    """Compile and link the extension; copy the Python package."""
    import pybind11

    objects = folder / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    include = [
        f"-I{checkout / 'include'}",
        f"-I{pybind11.get_include()}",
        f"-I{sysconfig.get_path('include')}",
    ]
    sources = [path for path in sorted(checkout.glob("src/*.cpp")) if path.stem not in LEFT_OUT]
    sources += sorted(checkout.glob("src/bindings/*.cpp"))

    def compiled(source: Path) -> Path:
        target = objects / f"{source.stem}.o"
        if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
            command = ["g++", *FLAGS, *include, "-c", str(source), "-o", str(target)]
            subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        linked = [str(path) for path in pool.map(compiled, sources)]
    extension = folder / f"cutagi{sysconfig.get_config_var('EXT_SUFFIX')}"
    command = ["g++", "-shared", "-pthread", *linked, "-o", str(extension), "-ldl"]
    subprocess.run(command, check=True)
    shutil.copytree(checkout / "pytagi", folder / "pytagi", dirs_exist_ok=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
