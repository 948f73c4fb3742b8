"""The command ``tagi-ddp plan``: its arguments and its output."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tagi_ddp.checks import count, positive
from tagi_ddp.plan.model import Cluster, Link, Training
from tagi_ddp.plan.report import default_ranks, plot, table, within
from tagi_ddp.plan.search import Budget

_count_or_zero = partial(count, low=0)
_positive_or_zero = partial(positive, zero=True)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``plan`` to the commands."""
    parser = commands.add_parser(
        "plan",
        help="predict the time of a step on many ranks",
        description="Predict the time of a step of DDPSequential on many ranks, from that of one "
        "rank and from latency and bandwidth of the links: for the sum of the deltas after every "
        "step, for merges of posteriors every few steps, and for asynchronous merges, on the "
        "average of all epochs. Each rank's share of a batch stays the same.",
        epilog="tagi_ddp.plan.predict is the same in Python; tagi_ddp.plan.measure_link "
        "measures latency and bandwidth.",
    )

    def add(name: str, kind: Callable[[str], Any], metavar: str, text: str, default: Any) -> None:
        asked = {"required": True} if default is None else {"default": default}
        text = text if default is None else f"{text}; default: {default}"
        parser.add_argument(name, type=kind, metavar=metavar, help=text, **asked)

    add("--step-ms", positive, "MS", "a step of one rank that does not communicate", None)
    add("--parameters", positive, "N", "parameters of the network; each is sent as 8 bytes", None)
    add("--ranks-per-node", count, "N", "ranks of a node, which share its link", 4)
    add("--node-latency-us", _positive_or_zero, "US", "latency inside of a node", 1.0)
    add("--node-gbs", positive, "GB/S", "GB/s of each rank inside of a node", 10.0)
    add("--latency-us", _positive_or_zero, "US", "latency between nodes", 20.0)
    add("--gbit", positive, "GBIT/S", "Gbit/s of a node's link, in each direction", 25.0)
    add("--sync-every", count, "K", "steps from one merge to the next", 8)
    add("--batches", count, "N", "steps of an epoch, for asynchronous merges", 100)
    add("--epochs", count, "N", "epochs, for asynchronous merges", 20)
    add("--blocking-epochs", _count_or_zero, "N", "how many of them block at every step", 8)
    add("--merge-ns", _positive_or_zero, "NS", "arithmetic of a merge for each of those bytes", 0.0)
    text = "bits of each number of a merge; default: 32"
    parser.add_argument("--bits", type=int, choices=(32, 16, 8), default=32, help=text)
    parser.add_argument(
        "--ranks", type=_numbers, metavar="N,N,...", help="default: 1,2,4,...,8192,10000"
    )
    budget = parser.add_argument_group(
        "a budget", "the fewest ranks that keep within it, and how; a line after the table"
    )
    budget.add_argument(
        "--hours", type=positive, metavar="H", help="how long training may take; needs --shares"
    )
    budget.add_argument(
        "--shares",
        type=positive,
        metavar="N",
        help="the work of training: steps that one rank alone would make",
    )
    budget.add_argument(
        "--memory-gb", type=positive, metavar="GB", default=math.inf, help="memory of a rank"
    )
    parser.add_argument("--plot", metavar="FILE", help="plot, too, to a .png, .svg or .pdf file")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    training = Training(
        step=options.step_ms / 1e3,
        parameters=options.parameters,
        sync_every=options.sync_every,
        batches=options.batches,
        epochs=options.epochs,
        warmup_epochs=options.blocking_epochs,
        cooldown_epochs=0,
        merge=options.merge_ns / 1e9,
        bits=options.bits,
    )
    cluster = Cluster(
        Link(options.node_latency_us / 1e6, options.node_gbs * 1e9),
        Link(options.latency_us / 1e6, options.gbit * 1e9 / 8),
        options.ranks_per_node,
    )
    if (options.hours is None) != (options.shares is None):
        print("tagi-ddp: a budget needs both --hours and --shares", file=sys.stderr)
        return 2
    ranks = options.ranks or default_ranks()
    print(table(training, cluster, ranks))
    if options.hours is not None:
        budget = Budget(options.shares, 3600 * options.hours, 1e9 * options.memory_gb)
        print("\n" + within(training, cluster, budget))
    if options.plot:
        try:
            plot(options.plot, training, cluster, ranks)
        except (ImportError, OSError, ValueError) as error:
            print(f"tagi-ddp: --plot {options.plot}: {error}", file=sys.stderr)
            return 1
    return 0


def _numbers(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]
