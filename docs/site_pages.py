"""What the site has beside the pages of this folder: a hook of mkdocs, which `make docs` runs.

Pages are made of the README, of the examples, of the public names' docstrings, of the JSON that
the benchmarks have written, and of the notebooks, which run for it. A public name without a
docstring is an error, and so is a cell that fails.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import griffe
import nbformat
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "build" / "bench.json"
MODULES = [
    "tagi_ddp",
    "tagi_ddp.communicators",
    "tagi_ddp.checkpoint",
    "tagi_ddp.sklearn",
    "tagi_ddp.parallel",
    "tagi_ddp.sharding",
    "tagi_ddp.strategy",
    "tagi_ddp.optim",
    "tagi_ddp.plan",
]
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
        "numbers.md": numbers(),
        **{f"reference/{name}.md": reference(name) for name in MODULES},
    }
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        pages |= notebook(path)
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to the pages of the site, and blocks be marked by their language alone."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    for pattern, place in PLACES:
        markdown = re.sub(pattern, place, markdown)
    return re.sub(r"^( *```\w+) .*$", r"\1", markdown, flags=re.MULTILINE)  # marks for the tests


def public_names(module: str) -> list[str]:
    """Return what a package says is public; PluginError if one of it has no docstring."""
    package = griffe.load(module, search_paths=[ROOT], resolve_aliases=True, allow_inspection=False)
    names = [name for name in package.exports or [] if not str(name).startswith("_")]
    bare = [each for name in names for each in undocumented(package[str(name)])]
    if bare or not names:
        raise PluginError(f"{module} has public names without a docstring: {', '.join(bare)}")
    return list(map(str, names))


def undocumented(thing: griffe.Object | griffe.Alias) -> list[str]:
    """Return it, if it has no docstring, and what it has that is public and has none."""
    if isinstance(thing, griffe.Alias):
        thing = thing.final_target
    bare = [] if thing.has_docstring else [thing.path]
    if isinstance(thing, griffe.Class):
        for name, member in thing.members.items():
            inherited = any(name in base.members for base in thing.mro())
            if member.is_function and not name.startswith("_") and not inherited:
                bare += undocumented(member)
    return bare


def reference(module: str) -> str:
    """Return a page of all public names of a package."""
    names = public_names(module)
    lines = [f"# {module}", ""]
    for name in names:
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


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
    """Run a notebook, in its folder; return its page and its pictures. PluginError if it fails."""
    cells = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": path.parent}}
    try:
        NotebookClient(cells, timeout=120, resources=folder, coalesce_streams=True).execute()
    except CellExecutionError as error:
        raise PluginError(f"{path.name}: {error}") from error
    names = {"output_files_dir": f"{path.stem}-pictures", "unique_key": "cell"}
    text, made = MarkdownExporter().from_notebook_node(cells, resources=names)
    title, _, rest = text.lstrip().partition("\n")
    rest = rest.replace("![png]", "![what this cell draws]")
    page = f"{title}\n\n[This page as a notebook]({path.name}), to be run and changed.\n{rest}"
    pictures = {f"notebooks/{name}": content for name, content in made["outputs"].items()}
    return {f"notebooks/{path.stem}.md": page, **pictures}


def numbers() -> str:
    """Return a table of what the benchmarks have measured here the last time."""
    lines = ["# The last run of the benchmarks", ""]
    if not BENCH.exists():
        lines.append(
            "None has run where this site was built: `make bench` writes what stands here."
        )
        return "\n".join(lines)
    rows = json.loads(BENCH.read_text())
    lines += [
        rows[0]["machine"] + ".",
        "",
        "| | ours | other | unit | times better |",
        "|---" * 5 + "|",
    ]
    for row in rows:
        figures = [row["ours"], row["other"], row["ratio"]]
        ours, other, ratio = ("" if each is None else f"{each:.3g}" for each in figures)
        name = row["name"].replace("|", "\\|")
        lines.append(f"| {name} | {ours} | {other} | {row['unit']} | {ratio} |")
    return "\n".join(lines)
