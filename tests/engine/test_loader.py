"""The libraries that the loader takes in fresh interpreters; the tests compile them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest
from support.engines import require_wheel

from tagi_ddp.engine import loader

SHIMS = Path(__file__).parents[2] / "cpp_backend" / "shims"
LIBMPI, LIBMPI_CXX, LIBNCCL = "libmpi.so.40", "libmpi_cxx.so.40", "libnccl.so.2"
STUBS = {LIBMPI: "stub", LIBMPI_CXX: "stub", LIBNCCL: "stub"}
ALL_STUBS = {"TAGI_DDP_LIBMPI": "stub", "TAGI_DDP_LIBNCCL": "stub"}


def python(code: str, cwd: Path, **variables: str) -> str:
    """Run ``code`` in a fresh interpreter and return what it prints; stderr must stay empty."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TAGI_DDP_", "MPI4PY_"))}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env=env | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def preloaded(cwd: Path, before: str = "", **variables: str) -> dict[str, str]:
    """Return `loaded_libraries` after a preload in a fresh interpreter that ran ``before``."""
    code = f"{before}\nfrom tagi_ddp.engine import loader\nloader.preload()\n"
    return ast.literal_eval(python(code + "print(loader.loaded_libraries())", cwd, **variables))


def error_of(code: str, cwd: Path, **variables: str) -> str:
    """Return the text of the ImportError that ``code`` ends in."""
    body = "\n".join("    " + line for line in code.splitlines())
    return python(f"try:\n{body}\nexcept ImportError as error: print(error)", cwd, **variables)


def library(path: Path, *linked: Path) -> Path:
    """Compile an empty shared object whose SONAME is its file name, linked to ``linked``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    links = [flag for other in linked for flag in (str(other), f"-Wl,-rpath,{other.parent}")]
    subprocess.run(
        [
            *("c++", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-Wl,--no-as-needed"),
            *("-x", "c++", os.devnull, "-x", "none", *links, "-o", str(path)),
        ],
        check=True,
        timeout=60,
    )
    return path


def test_the_engine_runs_on_stand_ins_alone(tmp_path: Path) -> None:
    code = """
import numpy as np
from tagi_ddp.engine.loader import load_engine, loaded_libraries
before = loaded_libraries()
pytagi = load_engine()
from pytagi.nn import Linear, Sequential
mean, variance = Sequential(Linear(4, 2))(np.ones(12, np.float32))
print([before, pytagi.__name__, loaded_libraries(), mean.size, bool((variance > 0).all())])
"""
    assert ast.literal_eval(python(code, tmp_path, **ALL_STUBS)) == [{}, "pytagi", STUBS, 6, True]


def test_nobody_takes_the_stand_in_for_an_mpi(tmp_path: Path) -> None:
    code = """
import ctypes
from tagi_ddp.engine import loader
loader.preload()
held, visible = ctypes.CDLL("libmpi.so.40"), ctypes.CDLL(None)
print([hasattr(held, "MPI_Get_version"), hasattr(held, "MPI_Bcast"), hasattr(visible, "MPI_Bcast")])
"""
    assert ast.literal_eval(python(code, tmp_path, **ALL_STUBS)) == [False, True, False]


@pytest.mark.parametrize(("soname", "source"), [(LIBMPI, "libmpi.cpp"), (LIBNCCL, "libnccl.cpp")])
def test_every_stand_in_function_fails_without_a_crash(
    soname: str, source: str, tmp_path: Path
) -> None:
    names = re.findall(r"^STAND_IN\((\w+)\);", (SHIMS / source).read_text(), re.MULTILINE)
    assert names
    code = f"""
import ctypes
from tagi_ddp.engine import loader
loader.preload()
library = ctypes.CDLL({soname!r})
print([name for name in {names} if getattr(library, name)(*[None] * 8) == 0])
"""
    assert python(code, tmp_path, **ALL_STUBS) == "[]\n"


def test_the_stand_ins_say_what_they_are(tmp_path: Path) -> None:
    code = """
import ctypes
from tagi_ddp.engine import loader
loader.preload()
text = ctypes.CDLL("libnccl.so.2").ncclGetErrorString
text.restype = ctypes.c_char_p
print(text(2).decode())
flag = ctypes.c_int(7)
ctypes.CDLL("libmpi.so.40").MPI_Initialized(ctypes.byref(flag))
print(flag.value)
"""
    text, initialized = python(code, tmp_path, **ALL_STUBS).splitlines()
    assert "stand-in" in text
    assert "pip install" in text
    assert "TAGI_DDP_LIBNCCL" in text
    assert initialized == "0"


def test_takes_open_mpi_where_mpi4py_does(tmp_path: Path) -> None:
    mpi = library(tmp_path / LIBMPI)
    expected = {LIBMPI: str(mpi), LIBMPI_CXX: "stub"}
    for place in (mpi, tmp_path, f"/nowhere:{tmp_path}"):
        assert preloaded(tmp_path, MPI4PY_LIBMPI=str(place)).items() >= expected.items()


def test_takes_the_cxx_bindings_of_the_same_open_mpi(tmp_path: Path) -> None:
    mpi = library(tmp_path / "lib" / LIBMPI)
    cxx = library(tmp_path / "lib" / LIBMPI_CXX, mpi)
    (tmp_path / LIBMPI).symlink_to(mpi)
    for folder in (tmp_path, tmp_path / "lib"):
        found = preloaded(tmp_path, MPI4PY_LIBMPI=str(folder))
        assert found[LIBMPI] == str(folder / LIBMPI)
        assert found[LIBMPI_CXX] == str(cxx)


def test_leaves_mpich_to_mpi4py(tmp_path: Path) -> None:
    library(tmp_path / "libmpi.so.12")
    library(tmp_path / LIBMPI)
    assert preloaded(tmp_path, MPI4PY_LIBMPI=str(tmp_path))[LIBMPI] == "stub"


@pytest.mark.parametrize(("soname", "other"), [("libmpi.so.12", True), (LIBMPI, False)])
def test_tells_an_mpi_that_the_engine_cannot_use(soname: str, other: bool, tmp_path: Path) -> None:
    library(tmp_path / soname)
    code = "from tagi_ddp.engine import loader; loader.preload(); print(loader.holds_other_mpi())"
    assert python(code, tmp_path, MPI4PY_LIBMPI=str(tmp_path)).strip() == str(other)


def test_takes_the_mpi_that_an_mpi4py_built_from_source_is_linked_to(tmp_path: Path) -> None:
    mpi = library(tmp_path / "prefix" / LIBMPI)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    library(tmp_path / "mpi4py" / f"MPI{suffix}", mpi)
    (tmp_path / "mpi4py" / "__init__.py").touch()
    found = preloaded(tmp_path, before=f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    assert found[LIBMPI] == str(mpi)


def test_passes_over_an_mpi_that_cannot_be_loaded(tmp_path: Path) -> None:
    missing = library(tmp_path / "libmissing.so")
    library(tmp_path / LIBMPI, missing)
    missing.unlink()
    assert preloaded(tmp_path, MPI4PY_LIBMPI=str(tmp_path))[LIBMPI] == "stub"


@pytest.mark.parametrize("soname", STUBS)
def test_what_the_process_holds_stays(soname: str, tmp_path: Path) -> None:
    held = library(tmp_path / soname)
    code = f"""
import ctypes
ctypes.CDLL({str(held)!r})
from tagi_ddp.engine import loader
loader.preload()
maps = open("/proc/self/maps").read()
print([loader.loaded_libraries(), "shims/{soname}" in maps])
"""
    found = ast.literal_eval(python(code, tmp_path, **ALL_STUBS))
    assert found == [STUBS | {soname: str(held)}, False]


def test_takes_what_the_dynamic_loader_finds_unless_told_not_to(tmp_path: Path) -> None:
    mpi = library(tmp_path / LIBMPI)
    library(tmp_path / LIBNCCL)
    search = {"LD_LIBRARY_PATH": str(tmp_path), "MPI4PY_LIBMPI": ""}
    assert preloaded(tmp_path, **search)[LIBMPI] == str(mpi)
    assert preloaded(tmp_path, **search, **ALL_STUBS) == STUBS


@pytest.mark.parametrize("folder", ["nvidia/nccl/lib", "torch/lib"])
def test_takes_the_nccl_that_torch_would(folder: str, tmp_path: Path) -> None:
    nccl = library(tmp_path / folder / LIBNCCL)
    others = tmp_path / "others"  # what is installed, but the wheels of NVIDIA's libraries
    others.mkdir()
    installed = Path(sysconfig.get_path("platlib"))
    for entry in installed.iterdir():
        if entry.name != "nvidia":
            (others / entry.name).symlink_to(entry)
    before = f"""
import sys
elsewhere = [entry for entry in sys.path if entry != {str(installed)!r}]
sys.path[:] = [{str(tmp_path)!r}, {str(others)!r}, *elsewhere]
"""
    assert preloaded(tmp_path, before)[LIBNCCL] == str(nccl)


@pytest.mark.parametrize("soname", STUBS)
def test_a_variable_overrules_the_search(soname: str, tmp_path: Path) -> None:
    chosen = library(tmp_path / soname)
    variable = "TAGI_DDP_" + soname.split(".")[0].upper()
    found = preloaded(tmp_path, **ALL_STUBS | {variable: str(chosen)})
    assert found == STUBS | {soname: str(chosen)}


def test_a_variable_that_is_wrong_is_an_error(tmp_path: Path) -> None:
    code = "from tagi_ddp.engine.loader import preload; preload()"
    other = str(library(tmp_path / "libother.so"))
    for wrong, reason in (("/nowhere.so", "cannot be loaded"), (other, f"is not {LIBNCCL}")):
        text = error_of(code, tmp_path, TAGI_DDP_LIBNCCL=wrong)
        assert text.startswith(f"TAGI_DDP_LIBNCCL={wrong} {reason}")


def test_a_missing_engine_says_what_to_install(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["pytagi"] = None
from tagi_ddp.engine.loader import load_engine
load_engine()
"""
    text = error_of(code, tmp_path, **ALL_STUBS)
    assert "pip install pytagi==0.2.1" in text
    assert ".".join(map(str, sys.version_info[:3])) in text


def test_an_engine_that_cannot_be_linked_names_the_libraries(tmp_path: Path) -> None:
    require_wheel()
    mpi = str(library(tmp_path / LIBMPI))
    code = "from tagi_ddp.engine.loader import load_engine; load_engine()"
    text = error_of(code, tmp_path, TAGI_DDP_LIBMPI=mpi)
    assert mpi in text
    assert "TAGI_DDP_LIBMPI=stub" in text


def test_the_engine_itself_tells_that_there_is_no_driver(tmp_path: Path) -> None:
    code = "import pytagi; print(pytagi.cuda.is_available(), pytagi.cuda.get_device_count() > 0)"
    assert python(code, tmp_path) in ("True True\n", "False False\n")


@pytest.mark.parametrize("driver", [True, False])
def test_the_engine_is_asked_where_there_is_a_driver(
    monkeypatch: pytest.MonkeyPatch, driver: bool
) -> None:
    extension = ModuleType("extension")
    extension.is_cuda_available = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setattr(loader, "_driver_sees_devices", lambda: driver)
    loader.answer_without_driver(extension)
    assert extension.is_cuda_available() is driver
    assert not hasattr(extension, "get_cuda_device_count")


def test_both_copies_of_the_hook_install_one_finder(tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
from tagi_ddp.engine import import_hook, loader
spec = importlib.util.spec_from_file_location("tagi_ddp.engine.copy", import_hook.__file__)
copy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(copy)
for hook in (copy, import_hook, copy):
    hook.install()
print(sum(f.__name__ == "TagiDdpEngineFinder" for f in sys.meta_path if isinstance(f, type)))
import pytagi
print(loader.loaded_libraries() == {STUBS})
"""
    assert python(code, tmp_path, **ALL_STUBS) == "1\nTrue\n"
