"""Write the licences of the code that is built into the backend, for the wheel.

    python bundled_licenses.py FOLDER

nanobind is installed with its licence; robin_map, a part of it, has one at the top of each file.
"""

import sys
from importlib.metadata import distribution
from pathlib import Path

import nanobind


def main(folder: Path) -> None:
    """Write a file for each project."""
    folder.mkdir(parents=True, exist_ok=True)
    (own,) = (f for f in distribution("nanobind").files or () if f.name == "LICENSE")
    (folder / "LICENSE.nanobind").write_text(own.read_text())
    header = Path(nanobind.__file__).parent / "ext/robin_map/include/tsl/robin_map.h"
    comment, end, _ = header.read_text().partition("*/")
    if "Copyright" not in comment:
        raise SystemExit(f"{header} does not begin with its licence")
    (folder / "LICENSE.robin_map").write_text(comment + end + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
