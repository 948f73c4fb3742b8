"""The tests of pytagi and of pycanari pass on our kernels, too.

TAGI_DDP_CUTAGI_SOURCE names a checkout of github.com/lhnguyen102/cuTAGI, TAGI_DDP_CANARI_SOURCE an
unpacked source distribution of pycanari 0.2.5, which must be installed. Their tests run as they
are, but that each Sequential which they make is accelerated.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.clients import write_mnist_files

CUTAGI = os.environ.get("TAGI_DDP_CUTAGI_SOURCE")
CANARI = os.environ.get("TAGI_DDP_CANARI_SOURCE")
TESTS = Path(__file__).parents[1]
# What the released pytagi has not yet.
NEWER = ("test_attention.py", "test_rmsnorm.py")
REFUSALS = ("cannot be computed natively: the backend has no kernels for", "torch does not compute")

pytestmark = pytest.mark.slow


def outcomes(folder: Path, tests: str, compute: str) -> dict[str, str]:
    """Return by test what went wrong, "" where nothing did; without those that were skipped."""
    report = folder / "report.xml"
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "support.accelerated", "--continue-on-collection-errors"),
            *(f"--junitxml={report}", tests),
        ],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "CLIENT_COMPUTE": compute,
            "TEST_CPU_ONLY": "1",
            "MPLBACKEND": "agg",
        },
        timeout=550,
        check=False,
    )
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("skipped") is None:
            text = "".join(part.text or "" for part in case if part.tag in ("failure", "error"))
            found[f"{case.get('classname')}::{case.get('name')}"] = text
    return found


@pytest.fixture(scope="module")
def cutagi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """pytagi's tests and what they need, and which of them pass without us."""
    if not CUTAGI:
        pytest.skip("TAGI_DDP_CUTAGI_SOURCE names no checkout of cuTAGI")
    pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("cutagi")
    for part in ("test", "examples", "data"):
        shutil.copytree(Path(CUTAGI, part), folder / part)
    shutil.rmtree(folder / "data" / "mnist", ignore_errors=True)
    write_mnist_files(folder / "data" / "mnist", {"train": 60000, "t10k": 10000})
    for name in NEWER:
        (folder / "test" / "py_unit" / name).unlink(missing_ok=True)
    plain = outcomes(folder, "test/py_unit", "")
    return folder, {name for name, text in plain.items() if not text}


@pytest.mark.parametrize("compute", ["auto", "engine", "native", "torch"])
def test_pytagis_own(cutagi: tuple[Path, set[str]], compute: str) -> None:
    folder, passed = cutagi
    assert len(passed) >= 15
    found = outcomes(folder, "test/py_unit", compute)
    refused = {name for name, text in found.items() if any(part in text for part in REFUSALS)}
    failed = {name for name, text in found.items() if text} - refused
    assert not failed
    if compute in ("auto", "engine"):
        assert not refused
        assert passed <= found.keys()


@pytest.mark.skipif(not CANARI, reason="TAGI_DDP_CANARI_SOURCE names no source of pycanari")
def test_canaris_own(tmp_path: Path) -> None:
    pytest.importorskip("canari")
    for part in ("test", "data"):
        shutil.copytree(Path(str(CANARI), part), tmp_path / part)
    found = outcomes(tmp_path, "test", "auto")
    assert len(found) == 27
    assert {name for name, text in found.items() if text} == set()
