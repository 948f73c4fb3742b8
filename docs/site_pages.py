"""What the site has beside the pages of this folder: a hook of mkdocs, which `make docs` runs.

Pages are made of the README, of the examples, of the docstrings (`site_reference`), of the
notebooks with their outputs, and of the JSON that the benchmarks write.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from nbconvert import MarkdownExporter
from site_reference import MODULES, linked, overview, reference
from site_types import types

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "build" / "bench.json"
# Where the files lie on the site that pages link to.
PLACES = [
    (r"\]\((?:\.\./)?README\.md", "](getting-started.md"),
    (r"\]\((?:\.\./)?CONTRIBUTING\.md", "](contributing.md"),
    (r"\]\((?:\.\./)?CHANGELOG\.md", "](changelog.md"),
    (r"\]\(docs/", "]("),
    (r"\[([^\]]+)\]\(\.\./(tests/[^)]*)\)", r"\1 (`\2`)"),  # which the site does not have
    (r"\]\((notebooks/[\w-]+)\.ipynb", r"](\1.md"),
    (r"\]\((?:\.\./)?examples/(?:\w+/)?(\w+)\.(\w+)", r"](examples.md#\1\2"),
]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    pages: dict[str, str | bytes] = {
        "getting-started.md": (ROOT / "README.md").read_text(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        "examples.md": examples(),
        "reference/index.md": overview(),
        **{f"reference/{name}.md": reference(name) for name in MODULES},
        "reference/types.md": types(),
    }
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        pages |= notebook(path)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def title_of(found: re.Match[str]) -> str:
    """Return a link that is written by a file's name, "[merging.md](merging.md)", by its title."""
    path = ROOT / "docs" / f"{found[1]}.md"
    title = path.read_text().partition("\n")[0].removeprefix("# ") if path.exists() else found[1]
    return f"[{title}]("


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put the name of the class into a method's heading, for readers and for the search."""
    return re.sub(
        r'(<h4 id="[\w.]+?\.(\w+)\.\w+" class="doc doc-heading">\s*<span class="[^"]*">)',
        lambda found: f'{found[1]}<span class="doc-owner">{found[2]}.</span>',
        html,
    )


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the pages of the site, and blocks be marked by their language alone."""
    if "@@" in markdown:
        raise PluginError(f"{page.file.src_uri} has a placeholder: @@")
    if page.file.src_uri.startswith("reference/"):
        return markdown
    if page.file.src_uri == "README.md":
        page.meta["hide"] = ["toc"]  # its doors stand beside each other
    if page.file.src_uri == "benchmarks.md":
        markdown += numbers()
    if page.file.src_uri == "getting-started.md":
        markdown = re.sub(r"^# .*", "# Overview", markdown)
    for pattern, place in PLACES:
        markdown = re.sub(pattern, place, markdown)
    markdown = re.sub(r"\[(?:docs/)?([\w-]+)\.md\]\(", title_of, markdown)
    markdown = linked(markdown, ("tagi_ddp",))
    return re.sub(r"^( *```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)  # marks for the tests


def examples() -> str:
    """Return a page of all scripts, with what they say of themselves, and of the manifests."""
    lines = ["# Examples", ""]
    for path in sorted((ROOT / "examples").rglob("*.*")):
        kind = {".py": "python", ".yaml": "yaml"}.get(path.suffix)
        if kind is None:
            continue
        text = path.read_text()
        name = str(path.relative_to(ROOT / "examples"))
        lines += [f"## {name} {{#{path.stem}{path.suffix[1:]}}}", ""]
        if kind == "python":
            lines += [str(ast.get_docstring(ast.parse(text))).partition("\n")[0], ""]
        lines += [f"```{kind}", text.rstrip(), "```", ""]
    return "\n".join(lines)


def notebook(path: Path) -> dict[str, str | bytes]:
    """Return the page of a notebook, with the outputs that it is stored with, and its pictures."""
    cells = nbformat.read(path, as_version=4)
    names = {"output_files_dir": f"{path.stem}-pictures", "unique_key": "cell"}
    text, made = MarkdownExporter().from_notebook_node(cells, resources=names)
    title, _, rest = text.lstrip().partition("\n")
    rest = rest.replace("![png]", "![what this cell draws]")
    page = f"{title}\n\n[This page as a notebook]({path.name}), to be run and changed.\n{rest}"
    pictures = {f"notebooks/{name}": content for name, content in made["outputs"].items()}
    return {f"notebooks/{path.stem}.md": page, **pictures}


def numbers() -> str:
    """Return a section with the last run of the benchmarks here; "" if there was none."""
    if not BENCH.exists():
        return ""
    rows = json.loads(BENCH.read_text())
    lines = [
        "\n\n## The last run on the machine that built this site\n",
        f"{rows[0]['machine']}.\n",
        "| | ours | other | unit | times better |",
        "|---" * 5 + "|",
    ]
    for row in rows:
        figures = [row["ours"], row["other"], row["ratio"]]
        ours, other, ratio = ("" if each is None else f"{each:.3g}" for each in figures)
        name = row["name"].replace("|", "\\|")
        lines.append(f"| {name} | {ours} | {other} | {row['unit']} | {ratio} |")
    return "\n".join(lines)
