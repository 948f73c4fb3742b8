"""Run the notebooks, or those named, and store them with their outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))


def executed(path: Path) -> Any:
    """Return the notebook with the outputs of a run in its folder."""
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": path.parent}}
    NotebookClient(
        notebook, timeout=120, resources=folder, coalesce_streams=True, record_timing=False
    ).execute()
    notebook.metadata.language_info = {"name": "python"}  # its version is the reader's
    return notebook


def main() -> None:
    """Run and store."""
    for path in map(Path, sys.argv[1:] or NOTEBOOKS):
        print(path)
        nbformat.write(executed(path), path)


if __name__ == "__main__":
    main()
