"""The table, the JSON file, and the description of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.launch import find_open_mpi, mpirun_version
from benchmarks.harness.measure import Figure, Missing, Row


def describe_machine() -> str:
    """Return processor, cores, kernel and versions in one line."""
    mpirun = find_open_mpi()
    parts = [
        _processor(),
        f"{len(os.sched_getaffinity(0))} cores",
        f"{platform.system()} {platform.release()}",
        f"Python {platform.python_version()}",
        *(_version(name) for name in ("numpy", "pytagi", "mpi4py", "torch")),
        mpirun_version(mpirun) if mpirun else "no Open MPI",
    ]
    return ", ".join(parts)


def print_table(rows: Sequence[Row]) -> None:
    """Print one line a row: medians, in brackets the quartiles, the ratio and its target.

    Below it stands why figures are missing.
    """
    reasons: list[str] = []
    width = max(len(row.name) for row in rows)
    print(f"{'':{width}}  {'ours':>24}  {'other':>24}  {'':9}  {'ratio':>6}  target")
    for row in rows:
        ours, other = (_text(figure, reasons) for figure in (row.ours, row.other))
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = "" if row.target is None else f"{row.target:g}"
        if row.target is not None and row.ratio is not None:
            target += "  met" if row.ratio >= row.target else "  missed"
        print(
            f"{row.name:{width}}  {ours:>24}  {other:>24}  {row.unit:9}  {ratio:>6}"
            f"  {target}".rstrip()
        )
    for number, reason in enumerate(reasons, 1):
        print(f"- ({number}): {reason}")


def write_json(rows: Sequence[Row], machine: str, path: Path) -> None:
    """Write the rows as a list of objects; ``missing`` says why a row has not both sides."""
    content = [
        {
            "name": row.name,
            "ours": _median(row.ours),
            "other": _median(row.other),
            "ratio": row.ratio,
            "target": row.target,
            "unit": row.unit,
            "machine": machine,
            "missing": [f.reason for f in (row.ours, row.other) if isinstance(f, Missing)],
        }
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")  # who reads it meanwhile has the old one or this
    new.write_text(json.dumps(content, indent=2) + "\n")
    new.replace(path)


def _text(figure: Figure | Missing, reasons: list[str]) -> str:
    """Return a figure, or the number that its reason has in ``reasons``."""
    if isinstance(figure, Missing):
        if figure.reason not in reasons:
            reasons.append(figure.reason)
        return f"- ({reasons.index(figure.reason) + 1})"
    return f"{_short(figure.median)} [{_short(figure.low)}-{_short(figure.high)}]"


def _median(figure: Figure | Missing) -> float | None:
    return None if isinstance(figure, Missing) else figure.median


def _short(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"
