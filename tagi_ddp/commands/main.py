"""The command ``tagi-ddp``."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tagi_ddp import __version__
from tagi_ddp.launcher.supervisor import LaunchError, supervise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (sys.argv by default) and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="tagi-ddp", description="Train pytagi networks on many processes."
    )
    parser.add_argument("--version", action="version", version=f"tagi-ddp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_doctor(commands)
    _add_plan(commands)
    options = parser.parse_args(argv)
    status: int = options.command(options)
    return status


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="run a script on several processes of this host",
        usage="tagi-ddp run [-n N] [--timeout S] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a Python script on several processes of this host, the ranks; "
        "DDPConfig.from_env() in it finds the rank. Output lines carry the rank. When a rank fails "
        "all are ended. OMP_NUM_THREADS is set to cores / N unless it is set already.",
        epilog="Exit status: that of the rank that failed first, 128 + the signal's number if one "
        "killed it; 124 after the timeout; 130 after Ctrl-C.",
    )
    parser.add_argument("-n", "--nprocs", type=_count, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="S", help="end all ranks after S seconds"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m")
    parser.add_argument("target", metavar="SCRIPT", help="the script, or the module's name with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.module and not os.path.exists(options.target):
        print(f"tagi-ddp: there is no script {options.target!r}", file=sys.stderr)
        return 2
    kind = "module" if options.module else "script"
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        supervise([kind, options.target, *options.arguments], options.nprocs, options.timeout)
    except LaunchError as error:
        # The rank has printed its traceback itself.
        text = f"rank {error.rank} failed first" if error.traceback else str(error)
        print(f"tagi-ddp: {text}; all ranks were ended", file=sys.stderr)
        return 128 - error.exitcode if error.exitcode < 0 else error.exitcode
    except TimeoutError as error:
        print(f"tagi-ddp: {error}", file=sys.stderr)
        return 124
    except KeyboardInterrupt:
        print("tagi-ddp: interrupted; all ranks were ended", file=sys.stderr)
        return 130
    except BrokenPipeError:  # of `tagi-ddp run ... | head`; keeps Python from flushing it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return 0


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check this machine: what works, what is missing, what to do",
        description="Check what this machine has: the engine, torch, MPI, CUDA, NCCL and more. "
        "Says what is missing and what to do.",
        epilog="Exit status: 0 if training works in one process and in several of this host, and, "
        "with --gpu, on GPUs; else 1.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--gpu", action="store_true", help="require GPUs")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="end what has not answered after S seconds; default: 30",
    )
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from tagi_ddp.commands import doctor  # here, as nobody else needs it

    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        found = doctor.examine(options.timeout)
    except KeyboardInterrupt:
        return 130
    print(doctor.as_json(found) if options.json else doctor.as_text(found))
    ready = doctor.readiness(found)
    needed = ["one process", "one host"] + ["gpus"] * options.gpu
    return 0 if all(ready[kind] for kind in needed) else 1


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="predict the time of a step on many ranks",
        description="Predict the time of a step of DDPSequential on many ranks, from that of one "
        "rank and from latency and bandwidth of the links: for the sum of the deltas after every "
        "step, for merges of posteriors every few steps, and for asynchronous merges, on the "
        "average of all epochs. Each rank's share of a batch stays the same.",
        epilog="The model is described in tagi_ddp/plan/model.py; tagi_ddp.plan.measure_link "
        "measures latency and bandwidth.",
    )

    def add(name: str, kind: Callable[[str], Any], metavar: str, text: str, default: Any) -> None:
        asked = {"required": True} if default is None else {"default": default}
        text = text if default is None else f"{text}; default: {default}"
        parser.add_argument(name, type=kind, metavar=metavar, help=text, **asked)

    add("--step-ms", _positive, "MS", "a step of one rank that does not communicate", None)
    add("--parameters", _positive, "N", "parameters of the network; 8 bytes travel for each", None)
    add("--ranks-per-node", _count, "N", "ranks of a node, which share its link", 4)
    add("--node-latency-us", _zero_or_more, "US", "latency inside of a node", 1.0)
    add("--node-gbs", _positive, "GB/S", "GB/s of each rank inside of a node", 10.0)
    add("--latency-us", _zero_or_more, "US", "latency between nodes", 20.0)
    add("--gbit", _positive, "GBIT/S", "Gbit/s of a node's link, in each direction", 25.0)
    add("--sync-every", _count, "K", "steps from one merge to the next", 8)
    add("--batches", _count, "N", "steps of an epoch, for asynchronous merges", 100)
    add("--epochs", _count, "N", "epochs, for asynchronous merges", 20)
    add("--blocking-epochs", _zero_or_count, "N", "how many of them wait at every step", 8)
    add("--merge-ns", _zero_or_more, "NS", "arithmetic of a merge for each of those bytes", 0.0)
    parser.add_argument(
        "--ranks", type=_counts, metavar="N,N,...", help="default: 1,2,4,...,8192,10000"
    )
    parser.add_argument("--plot", metavar="FILE", help="plot, too, to a .png, .svg or .pdf file")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace) -> int:
    from tagi_ddp import plan  # here, as nobody else needs it

    training = plan.Training(
        step=options.step_ms / 1e3,
        parameters=options.parameters,
        sync_every=options.sync_every,
        batches=options.batches,
        epochs=options.epochs,
        warmup_epochs=options.blocking_epochs,
        cooldown_epochs=0,
        merge=options.merge_ns / 1e9,
    )
    cluster = plan.Cluster(
        plan.Link(options.node_latency_us / 1e6, options.node_gbs * 1e9),
        plan.Link(options.latency_us / 1e6, options.gbit * 1e9 / 8),
        options.ranks_per_node,
    )
    ranks = options.ranks or plan.default_ranks()
    print(plan.table(training, cluster, ranks))
    if options.plot:
        try:
            plan.plot(options.plot, training, cluster, ranks)
        except (ImportError, OSError, ValueError) as error:
            print(f"tagi-ddp: --plot {options.plot}: {error}", file=sys.stderr)
            return 1
    return 0


def _exit_on_signal(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 up, got {text!r}")
    return int(text)


def _zero_or_count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer from 0 up, got {text!r}")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _number(text: str) -> float:
    """Return the number, or nan if it is none or infinite."""
    try:
        number = float(text)
    except ValueError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _positive(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number greater than 0, got {text!r}")
    return number


def _zero_or_more(text: str) -> float:
    number = _number(text)
    if not number >= 0:
        raise argparse.ArgumentTypeError(f"must be a number from 0 up, got {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds
