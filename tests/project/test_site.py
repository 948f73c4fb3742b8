"""The site that `make docs` builds: strictly, with all public names, in a real browser."""

from __future__ import annotations

import functools
import http.server
import importlib
import inspect
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

import pytest
from support.browser import CHROMIUM, Browser

import tagi_ddp

pytest.importorskip("mkdocs", reason="no mkdocs; pip install '.[docs]'")
pytest.importorskip("mkdocstrings", reason="no mkdocstrings; pip install '.[docs]'")
pytest.importorskip("nbconvert", reason="no nbconvert; pip install '.[docs]'")

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.slow


def build(root: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(target)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
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
    """Return a copy of what the site is made of."""
    for name in ("docs", "examples", "tagi_ddp"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


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


def hook(name: str) -> Any:
    """Return a file of docs/ that makes a part of the site."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docs"))


def modules() -> list[Any]:
    return [importlib.import_module(name) for name in hook("site_reference").MODULES]


def members(kind: type) -> set[str]:
    """Return the public methods and properties that this package gives a class."""
    found = set()
    for base in inspect.getmro(kind):
        for name, member in vars(base).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if name.startswith("_") or not inspect.isfunction(function):
                continue
            if function.__module__.startswith("tagi_ddp.") and inspect.getdoc(function):
                found.add(name)
    return found


def expected() -> set[str]:
    """Return the identifiers of the entries of all public names and their members."""
    found = set()
    for module in modules():
        for name in (each for each in module.__all__ if not each.startswith("_")):
            entry, thing = f"{module.__name__}.{name}", getattr(module, name)
            found.add(entry)
            if inspect.isclass(thing):
                found |= {f"{entry}.{member}" for member in members(thing)}
    return found


def search_index(site: Path) -> dict[str, dict[str, str]]:
    """Return what the search of the site finds, by place."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    return {entry["location"]: entry for entry in index["docs"]}


def test_the_search_finds_all_public_names_and_members(site: Path) -> None:
    places = {place.partition("#")[2] for place in search_index(site) if "reference/" in place}
    assert not expected() - places
    assert "tagi_ddp.DDPSequential.learn" in expected()
    assert "tagi_ddp.DDPSequential.layers" in places  # of the network that it wraps
    assert not [place for place in places if re.search(r"\._", place)]


def test_the_search_finds_what_entries_say(site: Path) -> None:
    index = search_index(site)
    for estimator in ("TAGIRegressor", "TAGIClassifier"):
        entry = index[f"reference/tagi_ddp.sklearn/#tagi_ddp.sklearn.{estimator}"]
        for name in inspect.signature(getattr(tagi_ddp.sklearn, estimator)).parameters:
            assert f">{name}<" in entry["text"] or f" {name}:" in entry["text"], name
        assert "n_iter_" in entry["text"]
    learn = index["reference/tagi_ddp/#tagi_ddp.DDPSequential.learn"]
    assert "DDPSequential.learn" in re.sub("<[^>]*>", "", learn["title"])
    device = index["reference/tagi_ddp/#tagi_ddp.init"]["text"]
    assert "cuda:&lt;number&gt;" in device or "cuda:<number>" in device


def test_names_in_prose_and_signatures_lead_to_their_entries(site: Path) -> None:
    page = (site / "compute" / "index.html").read_text()
    assert 'href="../reference/tagi_ddp/#tagi_ddp.DDPSequential"><code>DDPSequential<' in page
    entries = (site / "reference" / "tagi_ddp" / "index.html").read_text()
    _, _, learn = entries.partition('id="tagi_ddp.DDPSequential.learn"')
    entry = learn.partition("<h4 ")[0]
    assert 'href="#tagi_ddp.DDPSequential.forward"' in entry
    assert 'href="../types/#numpy.typing.ArrayLike"' in entry


def test_nothing_is_empty_or_compiled(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".py", ".pyc") or not path.stat().st_size]
    for page in site.rglob("index.html"):
        assert "<p>" in page.read_text(), page


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
    """Also such as are missing; and there is no section if no benchmark has run."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.harness.measure import Figure, Missing, Row
    from benchmarks.harness.report import write_json

    monkeypatch.setattr(hook("site_pages"), "BENCH", tmp_path / "bench.json")
    assert hook("site_pages").numbers() == ""
    pair = Row("a step | all", Figure.single(2.5), Figure.single(10.0), "ms", 1.0)
    alone = Row("alone", Figure.single(0.123456), Missing("no peer"), "s", None)
    write_json([pair, alone], "a machine", tmp_path / "bench.json")
    lines = hook("site_pages").numbers().splitlines()
    assert "a machine." in lines
    assert lines[-2:] == ["| a step \\| all | 2.5 | 10 | ms | 4 |", "| alone | 0.123 |  | s |  |"]


def test_the_navigation_has_all_notebooks(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert "Tutorials" in home
    assert all(f'href="notebooks/{path.stem}/"' in home for path in NOTEBOOKS)


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


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with Browser(tmp_path / "profile") as opened:
        yield opened


SEARCHES = {
    "DDPSequential.learn": "tagi_ddp.DDPSequential.learn",
    "hidden_layer_sizes": "tagi_ddp.sklearn.TAGIRegressor",
    "Checkpoints.resume": "tagi_ddp.checkpoint.Checkpoints.resume",
    "PeerLost": "tagi_ddp.PeerLost",
    "all_reduce": "tagi_ddp.Communicator.all_reduce",
    "SyncSchedule": "tagi_ddp.optim.SyncSchedule",
    "measure_link": "tagi_ddp.plan.measure_link",
}
LINKS = "[...document.querySelectorAll('.md-search-result__item a')].map(link => link.hash)"


def test_a_reader_searches_and_finds(browser: Browser, address: str) -> None:
    browser.open(f"{address}/")
    browser.evaluate("document.querySelector('.md-search__input').focus()")
    browser.wait_for("document.querySelector('.md-search-result__meta').textContent.match('start')")
    for text, entry in SEARCHES.items():
        browser.type(".md-search__input", text)
        browser.wait_for(f"{LINKS}.slice(0, 5).includes('#{entry}')")


def test_a_reader_chooses_the_dark_and_walks_on(browser: Browser, address: str) -> None:
    browser.open(f"{address}/")
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    browser.wait_for(f"{scheme} === 'default'")
    browser.evaluate("document.querySelector('.md-header__option label:not([hidden])').click()")
    browser.wait_for(f"{scheme} === 'slate'")
    browser.evaluate("document.querySelector('.md-footer__link--next').click()")
    browser.wait_for("document.querySelector('h1')?.textContent.startsWith('Installation')")
    browser.wait_for(f"{scheme} === 'slate'")
