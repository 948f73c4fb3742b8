"""Training throughput of 2 ranks, computed by torch; see `rows`.

``python -m benchmarks.families.scaling --plot FILE`` plots the speed-up of 1, 2 and 4 ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.families.compute import CNN, MLP, TOYS, Case
from benchmarks.harness.measure import Contender, Figure, Row, measure
from benchmarks.harness.networks import require_equal
from benchmarks.harness.work import data, trainer
from tagi_ddp import Communicator, DDPSequential, accelerate, init, launch

RANKS = (1, 2, 4)


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(g) ranks of 1 thread against 1 rank of 1 thread, on the same global batch.

    And, for information, against as many ranks that do not exchange anything: what the machine's
    cores can give.
    """
    return [row for case in _cases(quick) for row in _compare(communicator, case)]


def _cases(quick: bool) -> list[Case]:
    if quick:
        return [replace(TOYS[case.name], batch=max(RANKS)) for case in (MLP, CNN)]
    return [replace(MLP, batch=1024), CNN]


def _compare(communicator: Communicator, case: Case) -> list[Row]:
    samples, labels = data(case.inputs, case.batch)
    share = case.batch // communicator.size
    part = slice(communicator.rank * share, (communicator.rank + 1) * share)
    # As in `training`, the first network of a process, slower than later ones, is not measured.
    first = accelerate(case.network(case.width), compute="torch")
    first.set_threads(1)
    train_first = trainer(first, samples[part], labels[part])
    for _ in range(case.calls):
        train_first()
    group = DDPSequential(
        case.network(case.width), average=False, communicator=communicator, compute="torch"
    )
    single, apart = (accelerate(case.network(case.width), compute="torch") for _ in range(2))
    for model in (single, apart, group):
        model.set_threads(1)
    train_group = trainer(group, samples[part], labels[part])
    train_single = trainer(single, samples, labels)
    train_apart = trainer(apart, samples[part], labels[part])
    train_group()
    train_single()
    require_equal(group, single, case.network(case.width))
    contenders = [
        Contender("ours", train_group, calls=case.calls),
        Contender("1 rank", train_single, calls=case.calls, alone=True),
        Contender("no exchange", train_apart, calls=case.calls),
    ]
    figures = measure(communicator, contenders, case.sgd_rounds)
    return [
        Row(
            f"training by torch, {communicator.size} ranks, {case.name}, batch {case.batch}, "
            f"against {other}",
            figures["ours"].rate(case.batch),
            figures[other].rate(case.batch),
            "samples/s",
            target,
        )
        for other, target in (("1 rank", 1.8), ("no exchange", None))
    ]


Speed = tuple[str, int, Figure]  # network and batch, ranks, times as fast as one process


def speed_ups(quick: bool) -> list[Speed]:
    """Measure 1, 2 and 4 ranks of a thread each, against a process of one thread that is no rank.

    They take turns in one job, on the same global batches.
    """
    with init("shm") as world:
        return [speed for case in _cases(quick) for speed in _speed_ups(world, case)]


def _speed_ups(world: Communicator, case: Case) -> list[Speed]:
    samples, labels = data(case.inputs, case.batch)
    for _ in range(2):  # the first network of a process is slower than later ones
        single = accelerate(case.network(case.width), compute="torch")
        single.set_threads(1)
        train_single = trainer(single, samples, labels)
        train_single()
    contenders = [Contender("1 process", train_single, calls=case.calls, alone=True)]
    with ExitStack() as groups:
        for ranks in RANKS:
            train: Callable[[], object] = _rest
            if group := world.split(0 if world.rank < ranks else None):
                model = DDPSequential(
                    case.network(case.width),
                    average=False,
                    communicator=groups.enter_context(group),
                    compute="torch",
                )
                model.set_threads(1)
                share = case.batch // ranks
                part = slice(group.rank * share, (group.rank + 1) * share)
                train = trainer(model, samples[part], labels[part])
            contenders.append(Contender(str(ranks), train, calls=case.calls))
        figures = measure(world, contenders, case.sgd_rounds)
    one = figures["1 process"].median
    title = f"{case.name}, batch {case.batch}"
    return [(title, ranks, figures[str(ranks)].rate(one)) for ranks in RANKS]


def _rest() -> None:
    pass  # while others train


def plot(path: Path, speeds: Sequence[Speed]) -> None:
    """Plot medians and quartiles over the ranks, on logarithmic axes."""
    from examples.pictures import GREY, panels, plain_ticks, save

    figure, axes = panels(size=(6, 4.5))
    axes.plot(RANKS, RANKS, "--", color=GREY, label="ideal")
    cores = len(os.sched_getaffinity(0))
    if cores <= max(RANKS):
        axes.axvline(cores, color=GREY, linestyle=":", label=f"as many as cores: {cores}")
    for title, marker in zip(dict.fromkeys(title for title, _, _ in speeds), "os", strict=True):
        figures = [figure for name, _, figure in speeds if name == title]
        middle = [figure.median for figure in figures]
        errors = [
            [figure.median - figure.low for figure in figures],
            [figure.high - figure.median for figure in figures],
        ]
        axes.errorbar(RANKS, middle, errors, marker=marker, capsize=3, label=title)
    axes.set(xscale="log", yscale="log", xlabel="ranks of 1 thread", ylabel="times as fast")
    axes.set_title(f"Speed-up over 1 process of 1 thread, on {cores} cores")
    plain_ticks(axes.xaxis, RANKS)
    plain_ticks(axes.yaxis, (0.5, 1, 2, 4))
    axes.legend(loc="upper left")
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plot the speed-up of 1, 2 and 4 ranks.")
    parser.add_argument("--plot", type=Path, required=True, help="where the PNG file goes")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work?")
    options = parser.parse_args()
    [speeds, *_] = launch(speed_ups, max(RANKS), args=(options.quick,))
    for title, ranks, figure in speeds:
        print(f"{title}, ranks: {ranks}: {figure.median:.2f} [{figure.low:.2f}-{figure.high:.2f}]")
    plot(options.plot, speeds)


if __name__ == "__main__":
    main()
