"""``tagi-ddp run``: a script on several processes of this host."""

from __future__ import annotations

import argparse
import os
import signal
import sys

from tagi_ddp.checks import count, positive
from tagi_ddp.environment import detect
from tagi_ddp.launcher.supervisor import LaunchError, supervise


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``run`` to the commands."""
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
    parser.add_argument("-n", "--nprocs", type=count, default=2, metavar="N", help="default: 2")
    parser.add_argument(
        "--timeout", type=positive, metavar="S", help="end all ranks after S seconds"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m")
    parser.add_argument("target", metavar="SCRIPT", help="the script, or the module's name with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    if not options.module and not os.path.exists(options.target):
        print(f"tagi-ddp: there is no script {options.target!r}", file=sys.stderr)
        return 2
    try:
        outer = detect()
    except ValueError as error:
        print(f"tagi-ddp: {error}", file=sys.stderr)
        return 2
    if outer.world_size > 1 and outer.launcher != "tagi_ddp":
        print(
            f"tagi-ddp: this is task {outer.rank} of {outer.world_size} that {outer.launcher} has "
            "started, and each would start a job of its own. Start one task, or let "
            f"{outer.launcher} start the ranks: python {options.target}",
            file=sys.stderr,
        )
        return 2
    kind = "module" if options.module else "script"
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
