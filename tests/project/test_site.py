"""The site that `make docs` builds: strictly, with all public names, in a real browser."""

from __future__ import annotations

import functools
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytest.importorskip("mkdocs", reason="no mkdocs; pip install '.[docs]'")
pytest.importorskip("mkdocstrings", reason="no mkdocstrings; pip install '.[docs]'")
pytest.importorskip("nbconvert", reason="no nbconvert; pip install '.[docs]'")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(target)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=900,  # the notebooks run
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(ROOT, target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of what the site is made of, with notebooks that do nothing."""
    for name in ("docs", "examples", "tagi_ddp"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for path in NOTEBOOKS:
        write_notebook(tmp_path / path.relative_to(ROOT), "pass")
    return tmp_path


def write_notebook(path: Path, code: str) -> None:
    cells = [nbformat.v4.new_markdown_cell("# Title"), nbformat.v4.new_code_cell(code)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)


class Elements(HTMLParser):
    """Collects the ids of a page's elements, and where its pictures are."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.pictures: list[Path] = []
        self._folder = page.parent
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if tag == "img" and (source := values.get("src")):
            self.pictures.append(self._folder / source)


def site_pages() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("site_pages")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def modules() -> list[Any]:
    return [importlib.import_module(name) for name in site_pages().MODULES]


def test_every_public_name_has_its_place(site: Path) -> None:
    for module in modules():
        page = Elements(site / "reference" / module.__name__ / "index.html")
        expected = {f"{module.__name__}.{n}" for n in module.__all__ if not n.startswith("_")}
        assert expected <= page.ids


def test_the_search_knows_the_names(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}
    assert "reference/tagi_ddp.sklearn/#tagi_ddp.sklearn.TAGIRegressor" in places
    assert "reliability/#a-job-that-outlives-its-ranks" in places


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_its_page_with_outputs(site: Path, path: Path) -> None:
    folder = site / "notebooks"
    assert (folder / path.name).read_bytes() == path.read_bytes()  # for readers to run
    page = Elements(folder / path.stem / "index.html")
    assert "now-you" in page.ids
    pictures = [each for each in page.pictures if f"{path.stem}-pictures" in each.parts]
    assert pictures
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in pictures)


def test_numbers_are_those_of_the_benchmarks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also such as are missing; and there is a page where no benchmark has run."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.harness.measure import Figure, Missing, Row
    from benchmarks.harness.report import write_json

    monkeypatch.setattr(site_pages(), "BENCH", tmp_path / "bench.json")
    assert "None has run" in site_pages().numbers()
    pair = Row("a step | all", Figure.single(2.5), Figure.single(10.0), "ms", 1.0)
    alone = Row("alone", Figure.single(0.123456), Missing("no peer"), "s", None)
    write_json([pair, alone], "a machine", tmp_path / "bench.json")
    lines = site_pages().numbers().splitlines()
    assert "a machine." in lines
    assert lines[-2:] == ["| a step \\| all | 2.5 | 10 | ms | 4 |", "| alone | 0.123 |  | s |  |"]


def test_the_navigation_has_all_notebooks(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert "Tutorials" in home
    assert all(f'href="notebooks/{path.stem}/"' in home for path in NOTEBOOKS)


def test_a_cell_that_fails_fails_the_build(copy: Path, tmp_path: Path) -> None:
    path = copy / NOTEBOOKS[0].relative_to(ROOT)
    write_notebook(path, "raise ValueError('out of cheese')")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    assert path.name in done.stderr
    assert "out of cheese" in done.stderr


def test_a_broken_link_fails(copy: Path, tmp_path: Path) -> None:
    with open(copy / "docs" / "merging.md", "a") as page:
        page.write("\n[nowhere](clusters.md#nowhere)\n")
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    assert "clusters.md#nowhere" in done.stderr


def test_a_public_name_without_a_docstring_fails(copy: Path, tmp_path: Path) -> None:
    path = copy / "tagi_ddp" / "data" / "metrics.py"
    text, count = re.subn(
        r'(def gather\(.*?\n\).*?:\n)    """.*?"""\n', r"\1", path.read_text(), flags=re.S
    )
    assert count == 1
    path.write_text(text)
    done = build(copy, tmp_path / "site")
    assert done.returncode == 1
    assert (
        "tagi_ddp has public names without a docstring: tagi_ddp.data.metrics.gather" in done.stderr
    )


@pytest.fixture
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def shown(url: str) -> str:
    """Return the page as the browser has made it, scripts included."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    return subprocess.run(
        [BROWSER, *options, "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium")
def test_a_browser_shows_it(address: str) -> None:
    page = shown(f"{address}/reference/tagi_ddp/")
    assert "DDPSequential" in page
    assert "elastic" in page
    assert "The last run of the benchmarks" in shown(f"{address}/numbers/")
