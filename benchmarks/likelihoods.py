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


NOISES = ("1", "3")


def read(path: Path, noise: str) -> dict[str, list[tuple[int, float]]]:
    """Return batches and negative log-likelihoods: sums, and 16 ranks that merge, by name."""
    curves = defaultdict(list)
    for row in json.loads(path.read_text()):
        found = re.fullmatch(rf"noise {noise}, (.*), batch (\d+), (\d+ ranks?)", row["name"])
        if found and (found[1].startswith("sums") or found[3] == "16 ranks"):
            curves[f"{found[1]}, {found[3]}"].append((int(found[2]), row["ours"]))
    return dict(curves)


def main() -> None:
    from pictures import panels, plain_ticks, save

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    figure, all_axes = panels(len(NOISES), (7, 6), sharex=True)
    for axes, noise in zip(all_axes, NOISES, strict=True):
        curves = read(options.rows, noise)
        for (name, points), marker in zip(curves.items(), "xosv^D", strict=False):
            axes.plot(*zip(*points, strict=True), marker=marker, label=name)
        axes.set(xscale="log", yscale="log", ylabel=f"sigma_v = {noise}", ylim=(0.5, 1))
        plain_ticks(axes.yaxis, [0.5, 0.6, 0.7, 0.8, 0.9, 1])
    plain_ticks(axes.xaxis, [batch for batch, _ in points])
    axes.set(xlabel="batch")
    all_axes[0].set_title("Negative log-likelihood in nats after one pass, linear head")
    all_axes[0].legend(fontsize="small")
    save(figure, options.picture)


if __name__ == "__main__":
    main()
