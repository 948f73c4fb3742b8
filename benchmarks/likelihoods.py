"""Plot the likelihoods over batches that the family `batch_invariance` has measured.

``python -m benchmarks.likelihoods build/bench.json docs/pictures/likelihoods.png``
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "examples"))


def read(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Return batches and negative log-likelihoods, by the name of a curve."""
    curves = defaultdict(list)
    for row in json.loads(path.read_text()):
        if found := re.fullmatch(r"(.*), batch (\d+)(, \d+ ranks?)", row["name"]):
            name, batch, ranks = found.groups()
            curve = name if name.startswith("sums") else name + ranks
            curves[curve].append((int(batch), row["ours"]))
    return dict(curves)


def main() -> None:
    from pictures import panels, plain_ticks, save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    figure, axes = panels(size=(7, 4))
    batches = set()
    for (name, points), marker in zip(read(options.rows).items(), "xos^v", strict=False):
        axes.plot(*zip(*points, strict=True), marker=marker, label=name)
        batches |= {batch for batch, _ in points}
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="negative log-likelihood, nats")
    plain_ticks(axes.xaxis, sorted(batches))
    plain_ticks(axes.yaxis, [0.5, 0.6, 0.8, 1, 1.5, 2])
    axes.set_ylim(0.5, 2)
    axes.set_title("A linear head after one pass")
    axes.legend()
    save(figure, options.picture)


if __name__ == "__main__":
    main()
