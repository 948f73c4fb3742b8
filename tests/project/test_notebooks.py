"""The notebooks: they launch ranks, draw, find what they say, and are stored with these outputs.

`.venv/bin/python docs/run_notebooks.py` runs them and stores what they print and draw.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "docs"
NOTEBOOKS = sorted((FOLDER / "notebooks").glob("*.ipynb"))
# What no reader should see, control characters too.
TROUBLE = re.compile(r"traceback|warning|error:|[\x00-\x08\x0b-\x1f]", re.IGNORECASE)


def numbers(pattern: str, text: str) -> list[float]:
    """Return the numbers that the groups of the only match hold."""
    (found,) = re.finditer(pattern, text)
    return [float(group) for group in found.groups()]


def first_steps(text: str) -> None:
    assert sorted(re.findall(r"\[[01]\] I am rank ([01]) of 2", text)) == ["0", "1"]
    replicas = re.findall(r"rank ([01]) ends with the network (\w{16})", text)
    assert [rank for rank, _ in replicas] == ["0", "1"]
    assert len({replica for _, replica in replicas}) == 1
    (error,) = numbers(r"test error ([\d.]+)%", text)
    assert error < 10


def regression(text: str) -> None:
    assert "replicas are equal: True" in text
    assert "their predictions: True" in text
    error, plain = numbers(r"error ([\d.]+); ([\d.]+) by the mean", text)
    assert error < 0.8 * plain
    (covered,) = numbers(r"coverage ([\d.]+)%", text)
    ideal, trembling = numbers(r"ideal ([\d.]+)%, give or take ([\d.]+)%", text)
    assert abs(covered - ideal) < 1.5 * trembling


def images(text: str) -> None:
    hashes = re.findall(r"^ *\d+   (\w{16})  (\w{16})$", text, re.MULTILINE)
    assert len(hashes) == 8
    assert all(zero == one for zero, one in hashes)
    assert "between the ranks: 0.0\n" in text
    assert "ReplicaMismatch: replicas differ first at layer 0" in text
    rows = dict(re.findall(r"^(\d [^\n]*?) {2,}(\S+e\S+) ", text, re.MULTILINE))
    assert len(rows) == 6
    assert float(rows["2 ranks, average=False"]) < 1e-6
    assert float(rows["2 ranks, average=True"]) > 1e-3
    errors = re.findall(r"e[+-]\d+ +([\d.]+)%$", text, re.MULTILINE)
    assert len(errors) == 6
    assert max(map(float, errors)) < 20


def merging(text: str) -> None:
    scores = re.findall(r"^(\S.*?) +(\d+) +([\d.]+) +([+-][\d.]+) ± ([\d.]+)$", text, re.MULTILINE)
    assert [name for name, *_ in scores] == ["sum", "mean", "merged", "merged, Bayes"]
    exchanges = {name: int(count) for name, count, *_ in scores}
    assert exchanges["merged"] < exchanges["sum"] / 7
    assert all(float(more) < 0.05 for *_, more, _ in scores)
    distances = dict(re.findall(r"^(\S.*?) +mean distance ([\d.]+)%", text, re.MULTILINE))
    assert float(distances["sum"]) < 4
    assert float(distances["merged"]) < 4


def ensemble(text: str) -> None:
    assert "all ranks have the same mixture: True" in text
    assert "the mixture is what the formula says: True" in text
    assert len(re.findall(r"^member \d", text, re.MULTILINE)) == 4
    (gain,) = numbers(r"the mixture has (-?[\d.]+) more", text)
    assert gain > 0
    ours, ridge, likelihood, ridges = numbers(
        r"mean +([\d.]+) +([\d.]+) +(-[\d.]+) +(-[\d.]+)", text
    )
    assert ours < ridge
    assert likelihood > ridges
    (better,) = numbers(r"smaller error in (\d) of 8", text)
    assert better >= 6


def series(text: str) -> None:
    assert "10 networks; both ranks have the same results: True" in text
    error, repeated = numbers(r"mixture ([\d.]+)%; .* would have ([\d.]+)%", text)
    assert error < 0.8 * repeated
    (within,) = numbers(r"(\d+)% of the months", text)
    assert within > 80
    before, after = map(float, re.findall(r"off by ([\d.]+)", text))
    assert after < before


FACTS: dict[str, Callable[[str], None]] = {
    "1-first-steps": first_steps,
    "2-regression": regression,
    "3-images": images,
    "4-merging": merging,
    "5-ensemble": ensemble,
    "6-series": series,
}
RUNS = [NOTEBOOKS[0], *(pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS[1:])]


def name_of(path: Path) -> str:
    return path.stem


def run_notebooks() -> Any:
    source = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run_notebooks.py")
    assert source is not None
    assert source.loader is not None
    module = importlib.util.module_from_spec(source)
    source.loader.exec_module(module)
    return module


def test_each_notebook_has_its_facts() -> None:
    assert list(FACTS) == [path.stem for path in NOTEBOOKS]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(outputs: list[Any]) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream")


def check_outputs(path: Path, notebook: Any) -> None:
    """Check that a notebook ran without trouble, drew, and found what it says."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert {output.output_type for output in outputs} <= {"stream", "display_data"}
    assert {output.name for output in outputs if output.output_type == "stream"} == {"stdout"}
    text = printed(outputs)
    assert not TROUBLE.search(text), text
    FACTS[path.stem](text)


# What these find hardly depends on rounding, so their numbers are compared, too.
STEADY = {"2-regression", "5-ensemble", "6-series"}
NUMBER = r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?"


def frame(cell: Any) -> tuple[list[str], list[str]]:
    """Return the kinds of a cell's outputs, and its lines without numbers, hashes and order.

    Another machine rounds otherwise, and ranks print in another order.
    """
    lines = re.sub(rf"\b[0-9a-f]{{16,64}}\b|{NUMBER}", "#", printed(cell.outputs))
    kinds = sorted({kind for each in cell.outputs for kind in each.get("data", {})})
    return kinds, sorted(" ".join(line.split()) for line in lines.splitlines())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_kept_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run docs/run_notebooks.py"
    check_outputs(path, notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name_of)
def test_a_notebook_begins_with_a_title_and_ends_with_things_to_try(path: Path) -> None:
    first, *_, last = nbformat.read(path, as_version=4).cells
    assert first.source.startswith("# ")
    heading, *rest = last.source.splitlines()
    assert heading == "## Now you"
    assert 2 <= sum(line.startswith("- ") for line in rest) <= 4


@pytest.mark.parametrize("path", RUNS, ids=name_of)
def test_a_notebook_runs_and_its_outputs_are_current(path: Path) -> None:
    stored, notebook = nbformat.read(path, as_version=4), run_notebooks().executed(path)
    assert any("tagi_ddp.launch(" in cell.source for cell in code_cells(notebook))
    check_outputs(path, notebook)
    for before, after in zip(code_cells(stored), code_cells(notebook), strict=True):
        assert frame(before) == frame(after), "run docs/run_notebooks.py"
        if path.stem in STEADY:
            found = [
                list(map(float, re.findall(NUMBER, printed(each.outputs))))
                for each in (before, after)
            ]
            assert found[1] == pytest.approx(found[0], rel=0.1, abs=1), "run docs/run_notebooks.py"
