"""The memory of a training step; see `rows`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.families.compute import CNN, RESNET18, TOYS, Case
from benchmarks.harness import sgd
from benchmarks.harness.launch import ROOT
from benchmarks.harness.measure import Figure, Row
from benchmarks.harness.work import data, trainer
from tagi_ddp import Communicator, accelerate

OURS, SGD = "ours", "sgd"
STEPS = 3
CASES = {case.name: case for case in (CNN, RESNET18)}
TOY_CASES = {name: replace(TOYS[name], batch=32) for name in CASES}


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(h) the most that a process holds in steps, above what it holds before, against torch's SGD.

    Before, the libraries are loaded, and the network and the batch are there.
    """
    found = []
    for case in (TOY_CASES if quick else CASES).values():
        figures = {}
        for who in (OURS, SGD):
            command = [sys.executable, "-m", "benchmarks.families.memory", case.name, who]
            command += ["--quick"] * quick
            peaks = [
                float(subprocess.check_output(command, cwd=ROOT, timeout=100))
                for _ in range(1 if quick else 3)
            ]
            low, median, high = np.quantile(peaks, (0.25, 0.5, 0.75))
            figures[who] = Figure(median, low, high).in_unit(1e-6)
        name = f"memory of a step, {case.name}, batch {case.batch}, against torch's SGD"
        found.append(Row(name, figures[OURS], figures[SGD], "MB", 0.25))
    return found


def main() -> None:
    """Print the bytes that steps took, in this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("who", choices=(OURS, SGD))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    make = _ours if options.who == OURS else _sgd
    torch.set_num_threads(1)
    # Kernels are loaded when they are first used: by a toy.
    make(replace(TOY_CASES[options.case], batch=2))()()
    start = make((TOY_CASES if options.quick else CASES)[options.case])
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    train = start()
    for _ in range(STEPS):
        train()
    print(_resident("VmHWM") - before)


def _ours(case: Case) -> Callable[[], Callable[[], None]]:
    """Build what a step needs; return what, when called, gets ready and returns the step."""
    model, batch = case.network(case.width), data(case.inputs, case.batch)

    def start() -> Callable[[], None]:
        accelerated = accelerate(model, compute="torch")
        accelerated.set_threads(1)
        return trainer(accelerated, *batch)

    return start


def _sgd(case: Case) -> Callable[[], Callable[[], None]]:
    """Do the same for torch's SGD."""
    model = case.peer(case.width)
    samples, labels = map(torch.from_numpy, data(case.inputs, case.batch))
    return lambda: sgd.trainer(model, samples, labels)


def _resident(which: str) -> int:
    """Return a line of the process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == which:
            return 1024 * int(value.split()[0])
    raise RuntimeError(f"/proc/self/status has no {which}")


if __name__ == "__main__":
    main()
