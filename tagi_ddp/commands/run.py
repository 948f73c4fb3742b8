"""``tagi-ddp run``: a script on several processes of this host, or of each of several."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tagi_ddp.checks import count, positive
from tagi_ddp.commands.parser import CommandParser
from tagi_ddp.commands.signals import Ended, for_ranks, forwarded
from tagi_ddp.communicators.cores import usable_cores
from tagi_ddp.elastic.messages import PREEMPTED
from tagi_ddp.environment import detect
from tagi_ddp.launcher.failure import LaunchError
from tagi_ddp.launcher.nodes import Nodes
from tagi_ddp.launcher.rank_output import RankOutputs, standard_descriptors
from tagi_ddp.launcher.restarts import Restarts
from tagi_ddp.launcher.supervisor import supervise


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``run`` to the commands."""
    parser = commands.add_parser(
        "run",
        help="run a script on several processes",
        usage="tagi-ddp run [-n N] [--timeout S] [--max-restarts N] [--grace S]"
        " [--log-dir DIR [--tee]] [--nnodes K --node-rank R --rendezvous HOST:PORT]"
        " (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Run a Python script on several processes of this host, the ranks; "
        "DDPConfig.from_env() in it finds the rank. Output lines begin with the rank. When a rank "
        "fails all are ended. OMP_NUM_THREADS is set to cores / N unless it is set already. With "
        "--nnodes, run it on each of K hosts, numbered by --node-rank, to make one job of them: "
        "node 0 is HOST and listens at PORT, and all need the same TAGI_DDP_SECRET or "
        "TAGI_DDP_SECRET_FILE.",
        epilog="Signals: SIGUSR1 and SIGUSR2 are passed on to the process of each rank. SIGINT "
        "(Ctrl-C), SIGTERM, SIGHUP and SIGQUIT end all ranks and what they have started. Exit "
        "status: that of the rank that failed first, 128 + the signal's number if one killed it or "
        "ended the job; 124 after the timeout; 75 if the ranks have saved a checkpoint after a "
        "signal (tagi_ddp.checkpoint), which is no failure for --max-restarts.",
    )
    parser.add_argument(
        "-n",
        "--nprocs",
        type=_processes,
        default=2,
        metavar="N",
        help="number of ranks of this host; auto: one for each core that may be used; default: 2",
    )
    parser.add_argument(
        "--timeout", type=positive, metavar="S", help="end all ranks after S seconds"
    )
    parser.add_argument(
        "--nnodes", type=count, metavar="K", help="number of hosts; default: this one"
    )
    parser.add_argument(
        "--max-restarts",
        type=partial(count, low=0),
        default=0,
        metavar="N",
        help="when a rank fails, start all again, up to N times: the script goes on where "
        "tagi_ddp.checkpoint resumes it; or that rank alone, which joins the others, if their "
        "DDPSequential is elastic; not after the same error at the same step three times in a row; "
        "default: 0",
    )
    parser.add_argument(
        "--grace",
        type=positive,
        metavar="S",
        help="seconds between SIGTERM and SIGKILL when a signal ends the job; default: 30 for "
        "ranks that save a checkpoint then, else 3",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="append the output of rank R to DIR/rank-R.log instead of printing it",
    )
    parser.add_argument("--tee", action="store_true", help="with --log-dir, print it as well")
    parser.add_argument("--node-rank", type=int, metavar="R", help="of this host, from 0")
    parser.add_argument(
        "--rendezvous", type=_endpoint, metavar="HOST:PORT", help="where node 0 listens"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m")
    parser.add_argument("target", metavar="SCRIPT", help="the script, or the module's name with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT")
    parser.set_defaults(command=partial(_run, parser))


def _run(parser: CommandParser, options: argparse.Namespace) -> int:
    with standard_descriptors():
        try:
            return _run_job(parser, options)
        finally:
            _drop_unwritten()


def _run_job(parser: CommandParser, options: argparse.Namespace) -> int:
    _note_misplaced(parser, options)
    if options.tee and options.log_dir is None:
        _print("--tee needs --log-dir, the folder of the ranks' files")
        return 2
    if not options.module and not os.path.exists(options.target):
        _print(f"there is no script {options.target!r}")
        return 2
    try:
        nodes = _nodes(options)
        if nodes is None:
            _refuse_tasks(options.target)
    except ValueError as error:
        _print(str(error))
        return 2
    end = None if options.timeout is None else time.monotonic() + options.timeout
    restarts = Restarts(options.max_restarts)
    try:
        with closing(RankOutputs(options.log_dir, options.tee)) as outputs:
            while (status := _attempt(options, nodes, end, restarts, outputs)) and restarts.again:
                if status == PREEMPTED and forwarded:
                    break  # This host ends, too.
                nodes = _nodes(options, nodes.job if nodes is not None else "")
    except TimeoutError as error:
        _print(str(error))
        return 124
    except Ended as ended:
        name = signal.Signals(ended.number).name
        what = "interrupted" if ended.number == signal.SIGINT else f"received {name}"
        saved = ended.code == PREEMPTED
        _print(f"{what}; all ranks {'have saved a checkpoint and' if saved else 'were'} ended")
        return PREEMPTED if saved else 128 + ended.number
    except BrokenPipeError:  # The reader has ended: `tagi-ddp run ... | head`.
        return 128 + signal.SIGPIPE
    except OSError as error:
        _print(error.strerror or str(error))
        return 2
    return status


def _print(text: str) -> None:
    """Print a line on stderr, if that is open and can be written to."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"tagi-ddp: {text}", file=sys.stderr, flush=True)


def _drop_unwritten() -> None:
    """Drop output that cannot be written: Python would flush it at exit and change the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _note_misplaced(parser: CommandParser, options: argparse.Namespace) -> None:
    """Print a note about options of this command that stand behind the script, which gets them."""
    arguments = options.arguments
    target = f"-m {options.target}" if options.module else options.target
    for index, text in enumerate(arguments):
        if text == "--":
            return
        name, action, alone = parser.find(text)
        default = action is not None and getattr(options, action.dest, None) == action.default
        if not text.startswith(name) or not default or action is None or action.nargs == 0:
            continue
        option = " ".join(arguments[index : index + 1 + alone])
        _print(
            f"note: {option} stands behind {options.target}, so the script gets it. For tagi-ddp "
            f"run it stands before: tagi-ddp run {option} {target}"
        )


def _attempt(
    options: argparse.Namespace,
    nodes: Nodes | None,
    end: float | None,
    restarts: Restarts,
    outputs: RankOutputs,
) -> int:
    """Run all ranks once; return the job's exit status."""
    forwarded.clear()
    kind = "module" if options.module else "script"
    command = [kind, options.target, *options.arguments]
    timeout = None if end is None else max(0.0, end - time.monotonic())
    try:
        supervise(
            command,
            options.nprocs,
            timeout,
            nodes=nodes,
            restarts=restarts,
            signals=for_ranks,
            outputs=outputs,
            grace=options.grace,
        )
    except LaunchError as error:
        # The rank has printed its traceback itself.
        text = f"rank {error.rank} failed first" if error.traceback else str(error)
        if error.exitcode == PREEMPTED:
            text = "the ranks have saved a checkpoint, as a signal announced the end"
        then = "ended, and start again" if restarts.again else "ended"
        _print("; ".join(filter(None, [text, f"all ranks were {then}", restarts.reason])))
        return 128 - error.exitcode if error.exitcode < 0 else error.exitcode
    return 0


def _refuse_tasks(target: str) -> None:
    """Raise ValueError if this is one of several tasks of another launcher."""
    outer = detect()
    if outer.world_size > 1 and outer.launcher != "tagi_ddp":
        raise ValueError(
            f"this is task {outer.rank} of {outer.world_size} that {outer.launcher} has started, "
            "and each would start a job of its own. Start one task, or let "
            f"{outer.launcher} start the ranks: python {target}"
        )


def _processes(text: str) -> int:
    """Return the number of ranks; "auto": one for each core that this process may use."""
    return max(1, int(usable_cores())) if text == "auto" else count(text)


def _endpoint(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT or [ADDRESS]:PORT."""
    with suppress(ValueError):
        parts = urlsplit(f"//{text}")
        if parts.hostname and parts.port and parts.netloc == text:
            return parts.hostname, parts.port
    raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}")


def _nodes(options: argparse.Namespace, job: str = "") -> Nodes | None:
    """Return this host's node in a job of several hosts; None if there is one host; see `Nodes`.

    Raise ValueError that names the option that is wrong or missing.
    """
    values = {"--node-rank": options.node_rank, "--rendezvous": options.rendezvous}
    if options.nnodes is None:
        if named := [name for name, value in values.items() if value is not None]:
            raise ValueError(f"{named[0]} needs --nnodes, the number of hosts")
        return None
    if missing := [name for name, value in values.items() if value is None]:
        raise ValueError(f"--nnodes {options.nnodes} needs {missing[0]}")
    if not 0 <= options.node_rank < options.nnodes:
        raise ValueError(
            f"--node-rank is {options.node_rank}, but nodes go from 0 to {options.nnodes - 1}"
        )
    if options.nnodes == 1:
        return None
    return Nodes(options.nnodes, options.node_rank, options.rendezvous, job, _print)
