"""The check of docstrings in `make style`: each begins with a verb, or with the noun it defines."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tagi_ddp", "tests", "benchmarks", "examples")
FORBIDDEN = re.compile(r"(What|Who|Whose|Whom|Whether|Let|Tell|How|Which|Where|When|Why)\b")


def wrong(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the beginning of each docstring that begins with a forbidden word."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None and FORBIDDEN.match(text):
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def main() -> int:
    found = [
        f"{path.relative_to(ROOT)}:{line}: begin with a verb or a noun: {text}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in wrong(path.read_text())
    ]
    for each in found:
        print(each)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
