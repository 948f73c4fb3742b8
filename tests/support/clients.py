"""Images and two processes, for programs that were written for other packages."""

import gzip
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IMAGES = {"train": 4000, "t10k": 1000}


def idx(array: Any) -> bytes:
    """Return the bytes of an idx file with an array of uint8."""
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_mnist_files(folder: Path, images: dict[str, int] = IMAGES) -> None:
    """Put images of Fashion-MNIST into ``folder`` as MNIST's files; skip where there are none."""
    folder.mkdir(parents=True)
    for part, count in images.items():
        for kind, size in (("images-idx3", 28 * 28), ("labels-idx1", 1)):
            name = f"{part}-{kind}-ubyte"
            path = Path("/usr/share/datasets/fashion-mnist", f"{name}.gz")
            if not path.is_file():
                pytest.skip(f"there is no {path}: install Debian's dataset-fashion-mnist")
            with gzip.open(path) as file:
                start = file.read(16 if size > 1 else 8)
                pixels = file.read(count * size)
            (folder / name).write_bytes(start[:4] + struct.pack(">I", count) + start[8:] + pixels)


def run_under_mpirun(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``script`` as two processes, which must end well; skip where there is no mpirun."""
    pytest.importorskip("mpi4py")
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=folders) or pytest.skip("there is no mpirun")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [mpirun, *as_root, "--oversubscribe", "-n", "2", sys.executable, script, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done
