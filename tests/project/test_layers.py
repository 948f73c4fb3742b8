"""The order in which rooms of the package may import each other, which keeps it walkable."""

import ast
import subprocess
from pathlib import Path

import pytest
from support.imports import LAYERS, PACKAGE, circles, file_graph, modules, room_graph, upward

LOOSE = {"__init__", "__main__", "checks", "environment"}
LONGEST = 400  # lines of a file
# The class that users see has one short method for each docstring, in one file.
PUBLIC = "sequential.ddp_sequential"


def test_only_four_files_lie_beside_the_folders():
    assert {path.stem for path in PACKAGE.glob("*.py")} == LOOSE


def test_every_room_has_a_layer():
    assert set(room_graph(file_graph())) == {room for layer in LAYERS for room in layer}


def test_no_files_import_each_other_in_a_circle():
    assert circles(file_graph()) == []


def test_no_rooms_import_each_other_in_a_circle():
    assert circles(room_graph(file_graph())) == []


def test_no_import_runs_upward():
    assert upward(file_graph()) == []


def docstring_lines(path: Path) -> int:
    """Return the number of lines of the docstrings of a file."""
    docstrings = [
        node.body[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    ]
    return sum((each.end_lineno or 0) - each.lineno + 1 for each in docstrings)


def test_a_file_can_be_held_in_the_head():
    lengths = {name: len(path.read_text().splitlines()) for name, path in modules().items()}
    lengths[PUBLIC] -= docstring_lines(modules()[PUBLIC])
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_circles_and_upward_imports_are_found():
    graph = {
        "replica.host": {"update.exchange"},
        "update.exchange": {"replica.host"},
        "checks": set(),
    }
    assert len(circles(graph)) == 2
    assert upward(graph) == ["replica.host > update.exchange"]


def test_a_clone_holds_sources_and_pictures_and_nothing_built():
    root = PACKAGE.parent
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a clone")
    files = [root / name for name in listing.stdout.split("\0") if name]
    text = [path for path in files if path.suffix != ".png" and path.exists()]
    assert [path for path in text if b"\0" in path.read_bytes()] == []
