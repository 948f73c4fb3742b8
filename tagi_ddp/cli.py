"""The command ``tagi-ddp``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from tagi_ddp import __version__
from tagi_ddp.supervisor import LaunchError, supervise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (sys.argv by default) and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="tagi-ddp", description="Train pytagi networks on many processes."
    )
    parser.add_argument("--version", action="version", version=f"tagi-ddp {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_doctor(commands)
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
    from tagi_ddp import doctor  # here, as nobody else needs it

    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        found = doctor.examine(options.timeout)
    except KeyboardInterrupt:
        return 130
    print(doctor.as_json(found) if options.json else doctor.as_text(found))
    ready = doctor.readiness(found)
    needed = ["one process", "one host"] + ["gpus"] * options.gpu
    return 0 if all(ready[kind] for kind in needed) else 1


def _exit_on_signal(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 up, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds
