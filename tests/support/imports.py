"""The imports inside of the package, read from its files.

``python tests/support/imports.py`` prints the lines of each room, the arrows between rooms, and
whether any runs in a circle or upward. A room is a folder of the package, or a file beside them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tagi_ddp"

# The layers, the uppermost first. A file imports its own room and the rooms below; rooms of one
# layer do not know each other, but for SIDEWAYS.
LAYERS = (
    ("__main__",),
    ("commands",),
    ("__init__",),
    ("parallel", "sklearn"),
    ("strategy",),
    ("sequential", "checkpoint", "launcher"),
    ("elastic",),
    ("update", "torch_backend", "plan", "data"),
    ("optim", "sharding", "compute"),
    ("replica",),
    ("communicators", "engine", "trace", "kernels"),
    ("checks", "environment"),
)
# Communicators look for the libraries that the engine may have loaded.
SIDEWAYS = {("communicators", "engine.loader")}

Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the files by their names in the package, like "update.exchange"."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(folders if folders and name == "__init__" else [*folders, name])] = path
    return found


@functools.cache
def file_graph() -> dict[str, set[str]]:
    """Return which files each file imports, wherever in it the import stands."""
    files = modules()
    return {name: set(_imported(path, files)) - {name} for name, path in files.items()}


def _imported(path: Path, files: Mapping[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        targets: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            targets = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [(node.module or "", alias.name) for alias in node.names]
        for module, name in targets:
            top, _, inner = module.partition(".")
            if top != PACKAGE.name or inner == "_backend":
                continue
            whole = f"{inner}.{name}".strip(".")
            yield whole if whole in files else inner or "__init__"


def room_of(name: str) -> str:
    """Return the room of a file."""
    return name.partition(".")[0]


def room_graph(files: Graph) -> dict[str, set[str]]:
    """Return which other rooms each room imports."""
    rooms: dict[str, set[str]] = {}
    for name, imported in files.items():
        others = {room_of(other) for other in imported} - {room_of(name)}
        rooms.setdefault(room_of(name), set()).update(others)
    return rooms


def circles(graph: Graph) -> list[list[str]]:
    """Return a circle through every node that has one, by walking from each back to itself."""
    found = []
    for start in graph:
        before: dict[str, str] = {}
        todo = [start]
        while todo and start not in before:
            node = todo.pop()
            for other in graph.get(node, ()):
                if other not in before:
                    before[other] = node
                    todo.append(other)
        if start in before:
            path = [start]
            while len(path) == 1 or path[-1] != start:
                path.append(before[path[-1]])
            found.append(path[::-1])
    return found


def upward(files: Graph) -> list[str]:
    """Return the imports of a room above, or beside, as "importer > imported"."""
    layer_of = {room: number for number, layer in enumerate(LAYERS) for room in layer}
    return [
        f"{name} > {other}"
        for name, imported in files.items()
        for other in imported
        if room_of(name) != room_of(other)
        and layer_of[room_of(name)] >= layer_of[room_of(other)]
        and (room_of(name), other) not in SIDEWAYS
    ]


def main() -> None:
    files = file_graph()
    rooms = room_graph(files)
    lines: dict[str, int] = {}
    for name, path in modules().items():
        lines[room_of(name)] = lines.get(room_of(name), 0) + len(path.read_text().splitlines())
    for layer in LAYERS:
        for room in layer:
            print(f"{room:14} {lines[room]:6} lines  {' '.join(sorted(rooms[room]))}")
    print(f"{'all':14} {sum(lines.values()):6} lines")
    print(f"{len(rooms)} rooms, {sum(map(len, rooms.values()))} arrows between them")
    print(f"circles of files: {circles(files) or 'none'}; of rooms: {circles(rooms) or 'none'}")
    print(f"upward: {upward(files) or 'none'}")


if __name__ == "__main__":
    main()
