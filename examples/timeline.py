"""Plot what each rank does in one step, by what a job has written under TAGI_DDP_TRACE.

TAGI_DDP_TRACE=trace tagi-ddp run -n 2 examples/classification.py
python examples/timeline.py trace --plot timeline.png

It takes the folder's newest file, and of rank 0's steps the one of median length. Perfetto,
https://ui.perfetto.dev, shows all of a file.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from matplotlib.patches import Patch
from pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, panels, save

COLOURS = {
    "forward": SKY,
    "backward": BLUE,
    "waiting": "#D0D0D0",
    "reducing": VERMILION,
    "reducing and applying": VERMILION,
    "gathering": PURPLE,
    "applying": GREEN,
    "merging": ORANGE,
    "merging nodes": ORANGE,
}


def read(path):
    """Return by rank and thread the events of a file: names, begins and ends in ms."""
    found = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "X":  # has a duration
            begin, length = event["ts"] / 1e3, event["dur"] / 1e3
            thread = found.setdefault((event["pid"], event["tid"]), [])
            thread.append((event["name"], begin, begin + length))
    return dict(sorted(found.items()))


def median_step(threads):
    """Return when rank 0 begins a step, with its forward, and when all ranks have made it."""
    steps = [
        (rank, begin, end)
        for (rank, _), events in threads.items()
        for name, begin, end in events
        if name == "step"
    ]
    ends = sorted(end for rank, _, end in steps if rank == 0)
    lengths = np.diff(ends)
    chosen = np.argsort(lengths)[len(lengths) // 2]
    return ends[chosen], max(end for _, begin, end in steps if begin < ends[chosen + 1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="what TAGI_DDP_TRACE was")
    parser.add_argument("--plot", default="timeline.png", help="where the PNG file goes")
    options = parser.parse_args()
    path = max(options.folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    threads = read(path)
    first, last = median_step(threads)

    figure, axes = panels(size=(8, 1.6 + 0.5 * len(threads)))
    seen = set()
    for row, events in enumerate(threads.values()):
        for name, begin, end in events:
            if end < first or begin > last:
                continue
            if name == "step":
                style = {"facecolor": "none", "edgecolor": "black", "zorder": 3}
            else:
                style = {"color": COLOURS.get(name, GREY)}
                seen.add(name)
            axes.broken_barh([(begin - first, end - begin)], (row - 0.35, 0.7), **style)
    axes.set(xlim=(0, last - first), xlabel="time in ms", title="A step of median length")
    axes.set_yticks(range(len(threads)), [f"rank {rank}" for rank, _ in threads])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    parts = [Patch(color=COLOURS[name], label=name) for name in COLOURS if name in seen]
    parts.append(Patch(facecolor="none", edgecolor="black", label="step()"))
    figure.legend(handles=parts, loc="outside lower center", ncols=len(parts))
    save(figure, options.plot)


if __name__ == "__main__":
    main()
