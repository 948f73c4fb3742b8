"""Wheels as `make wheels` builds them, and what a release needs beside them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_trains_in_a_fresh_environment(tmp_path: Path) -> None:
    """It is one for many systems, as auditwheel says; the recipe itself tries it."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    done = subprocess.run(
        ["make", "wheels", f"PYTHONS={sys.executable}", "--assume-old=.venv/.installed-wheels"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"tagi_ddp-.*-{tag}-{tag}-manylinux_2_\d+_x86_64\.whl", wheel.name)
    assert f"on Python {sys.version.split()[0]}: [" in done.stdout
    with zipfile.ZipFile(wheel) as files:
        licences = {Path(name).name for name in files.namelist() if "/licenses/" in name}
    assert licences == {"LICENSE", "LICENSE.nanobind", "LICENSE.robin_map"}


def test_a_release_is_of_the_pythons_that_the_engine_has_wheels_for() -> None:
    """The workflow can be read, builds with the settings of pyproject.toml, and waits for all."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert set(workflow["jobs"]["release"]["needs"]) == {"wheels", "source"}
    settings = (ROOT / "pyproject.toml").read_text()
    assert "python_version < '3.13'" in settings  # where the engine has no wheels
    assert 'build = "cp31{0,1,2}-manylinux_x86_64"' in settings
    command = re.search(r'test-command = "python \{project\}/(.*)"', settings)
    assert command is not None
    assert (ROOT / command[1]).is_file()
