"""The types that users see; `make lint` runs mypy on `support/typed_*.py`, too."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pytagi.nn import Sequential

import tagi_ddp
from tagi_ddp.sequential import interface

ROOT = Path(__file__).parents[2]
PYRIGHT = shutil.which("pyright")


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_what_the_wrapped_network_has_is_declared() -> None:
    """Type checkers know these names from there alone; they are found at run time."""
    tree = ast.parse(Path(interface.__file__).read_text())
    block = next(node for node in ast.walk(tree) if isinstance(node, ast.If))
    names = {node.name for node in block.body if isinstance(node, ast.FunctionDef)}
    names |= {ast.unparse(node.target) for node in block.body if isinstance(node, ast.AnnAssign)}
    assert names == public(Sequential) - public(tagi_ddp.DDPSequential)


@pytest.mark.slow
@pytest.mark.skipif(PYRIGHT is None, reason="no pyright; pip install 'pyright[nodejs]'")
def test_pyright_finds_misspelt_names_and_knows_all_types(tmp_path: Path) -> None:
    settings = {
        "include": ["typed_*.py"],
        "extraPaths": [str(ROOT)],
        "reportUnnecessaryTypeIgnoreComment": "error",
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for name in ("typed_names.py", "typed_script.py"):
        shutil.copy(ROOT / "tests" / "support" / name, tmp_path)
    done = subprocess.run(
        [str(PYRIGHT), "-p", str(tmp_path), "--pythonpath", sys.executable],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
