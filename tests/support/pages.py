"""The README and the pages of docs/, read: blocks of code, scripts, words in backticks, links.

How a fenced block is marked:

- ``python``: runs as printed. The blocks of a page, in order, are one script; a first line like
  ``# tagi-ddp run -n 2 script.py`` begins another one, and is its command.
- ``python gpu``: the same, where there is a GPU.
- ``python file=examples/trainer.py``: an excerpt of a file that other tests run.
- ``text output``: lines that the script before it prints; ``text layers``: the order of imports.
- ``text``: anything else. ``sh``: commands. ``console``: commands after "$ ", and what they print.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"# (?:tagi-ddp run -n (\d+)(| --max-restarts \d+)|python) script\.py\n")


@dataclass(frozen=True)
class Block:
    """A fenced block; ``kind`` is the first word after the fence, ``option`` the rest."""

    kind: str
    option: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands that a reader types."""
        lines = self.text.splitlines() if self.kind in ("sh", "console") else []
        typed = [line.removeprefix("$ ") for line in lines if self._is_typed(line)]
        return [line.partition(" #")[0] for line in typed]

    def _is_typed(self, line: str) -> bool:
        return line.startswith("$ ") or (self.kind == "sh" and bool(line))


@dataclass
class Script:
    """Blocks of one page that run together, on so many ranks, and lines that they print.

    ``options`` are the launcher's own.
    """

    name: str
    ranks: int
    gpu: bool
    options: list[str]
    code: str = ""
    prints: list[str] = field(default_factory=list)


@cache
def text_of(page: Path) -> str:
    return page.read_text()


@cache
def blocks(page: Path) -> list[Block]:
    found = []
    for _, info, text in _FENCE.findall(text_of(page)):
        kind, _, option = info.partition(" ")
        found.append(Block(kind, option, textwrap.dedent(text) if kind != "python" else text))
    return found


@cache
def prose(page: Path) -> str:
    """Return the page without its blocks."""
    return _FENCE.sub("", text_of(page))


def spans(page: Path) -> list[str]:
    """Return what stands in backticks."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Return what links may name after "#": the headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def scripts(page: Path) -> list[Script]:
    """Return the scripts of the page's blocks."""
    found: list[Script] = []
    for block in blocks(page):
        if block.kind == "python" and block.option in ("", "gpu"):
            command = _COMMAND.match(block.text)
            if command or not found or found[-1].gpu != (block.option == "gpu"):
                name = f"{page.stem} {len(found) + 1}"
                ranks = int(command[1] or 1) if command else 1
                options = (command[2] or "").split() if command else []
                found.append(Script(name, ranks, block.option == "gpu", options))
            found[-1].code += block.text
        elif (block.kind, block.option) == ("text", "output"):
            found[-1].prints += block.text.splitlines()
    return found


@cache
def repository() -> frozenset[str]:
    """Return the paths of all files and folders that belong to the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.splitlines()
    if not listed:  # an export without .git
        skipped = (".venv", "build", "dist")
        found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
        listed = [str(path) for path in found if path.parts[0] not in skipped]
    files = {Path(name) for name in listed if (ROOT / name).is_file()}
    return frozenset(str(path) for file in files for path in (file, *file.parents))
