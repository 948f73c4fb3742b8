"""The names that `import tagi_ddp` brings, and the libraries that it does not load."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import tagi_ddp

LAZY = {"numpy", "torch", "mpi4py", "pytagi", "cutagi", "tqdm", "cloudpickle"}


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, tagi_ddp; print(*{name.split('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert not loaded & LAZY


def test_a_clone_without_the_backend_says_so(tmp_path: Path) -> None:
    package = Path(tagi_ddp.__file__).parent
    shutil.copytree(package, tmp_path / "tagi_ddp", ignore=shutil.ignore_patterns("*.so"))
    done = subprocess.run(
        # -S: without the import hook of an editable installation.
        [sys.executable, "-S", "-c", "import tagi_ddp"],
        cwd=tmp_path,
        env={"PYTHONPATH": sysconfig.get_path("platlib")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"ImportError: {tmp_path / 'tagi_ddp'} has no C++ backend")
    assert "pip install --editable" in message


def test_what_users_install_replaces_no_torch() -> None:
    """Only the extra for developers pins a release."""
    required = importlib.metadata.requires("tagi-ddp") or []
    exact = [each for each in required if "==" in each.partition(";")[0]]
    assert [each.partition("==")[0] for each in exact] == ["torch"]
    assert re.search("extra == .dev", exact[0])


@pytest.mark.parametrize("extra", ["examples", "docs"])
def test_no_target_of_make_replaces_the_torch_of_another(extra: str) -> None:
    (pin,) = re.findall(r"torch==[\w.]+", str(importlib.metadata.requires("tagi-ddp")))
    command = ["make", "--dry-run", "--what-if=pyproject.toml", f".venv/.installed-{extra}"]
    root = Path(__file__).parents[2]
    printed = subprocess.check_output(command, cwd=root, text=True, timeout=60)
    assert f"--editable '.[{extra}]' {pin}\n" in printed


def test_public_names() -> None:
    assert all(hasattr(tagi_ddp, name) for name in tagi_ddp.__all__)
    assert tagi_ddp.__version__ == importlib.metadata.version("tagi-ddp")
    citation = (Path(__file__).parents[2] / "CITATION.cff").read_text()
    assert f"\nversion: {tagi_ddp.__version__}\n" in citation


def test_types_are_shipped() -> None:
    files = {str(file) for file in importlib.metadata.files("tagi-ddp") or ()}
    assert "tagi_ddp/_backend.pyi" in files
    assert (Path(tagi_ddp.__file__).parent / "py.typed").is_file()


PACKAGES = {
    "parallel": "parallel",
    "sharding": "torch",
    "sklearn": "sklearn",
    "strategy": "torch",
    "optim.DASO": "torch",
}


def test_packages_come_when_asked_for_or_name_their_extra() -> None:
    """In one process, which is told that the libraries of all extras are missing."""
    code = f"""
import sys
sys.modules |= dict.fromkeys(["torch", "sklearn", "omegaconf", "mpi4py"])
import tagi_ddp
tagi_ddp.checkpoint.Checkpoints, tagi_ddp.communicators.Communicator, tagi_ddp.plan.predict
tagi_ddp.data, tagi_ddp.launcher, tagi_ddp.sequential, tagi_ddp.optim.SyncSchedule
for name, extra in {PACKAGES}.items():
    try:
        eval(f"tagi_ddp.{{name}}")
    except ImportError as error:
        assert f"tagi_ddp.{{name}} needs" in str(error), error
        assert f"pip install '.[{{extra}}]'" in str(error), error
    else:
        raise AssertionError(name)
assert not hasattr(tagi_ddp, "lern")
help(tagi_ddp)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
