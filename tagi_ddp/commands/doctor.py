"""``tagi-ddp doctor``: a report of what works on this machine, with remedies."""

from __future__ import annotations

import argparse
import json
from typing import Any

from tagi_ddp.checks import positive
from tagi_ddp.commands.check import Finding, Findings, run_all

# The checks that need a GPU; the last one follows from the others.
_GPU_CHECKS = ("CUDA", "NCCL", "compute on GPUs")


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add ``doctor`` to the commands."""
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
        type=positive,
        default=30.0,
        metavar="S",
        help="end what has not answered after S seconds; default: 30",
    )
    parser.set_defaults(command=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from tagi_ddp.commands.checks import CHECKS, compute_on_gpus  # Other commands do not need them.

    found = run_all(CHECKS, options.timeout)
    found["compute on GPUs"] = compute_on_gpus(found)
    print(as_json(found) if options.json else as_text(found))
    ready = readiness(found)
    needed = ["one process", "one host"] + ["gpus"] * options.gpu
    return 0 if all(ready[kind] for kind in needed) else 1


def readiness(found: Findings) -> dict[str, bool]:
    """Return whether this machine is ready, for each kind of training."""
    ok = {name for name, finding in found.items() if finding.status == "ok"}
    one_process = ok >= {"tagi_ddp", "engine"}
    return {
        "one process": one_process,
        "one host": one_process and "shared memory" in ok,
        "many hosts": one_process and not ok.isdisjoint({"MPI", "gloo"}),
        "gpus": one_process and ok >= {"NCCL", "compute on GPUs"},
    }


def as_json(found: Findings) -> str:
    """Return the report as one JSON object."""
    checks = [
        {"name": name, "status": f.status, "detail": f.detail, "remedy": f.remedy}
        for name, f in found.items()
    ]
    return json.dumps({"checks": checks, "ready": readiness(found)}, indent=2)


def _grouped(found: Findings) -> dict[str, Finding]:
    """Return the findings; merge those about GPUs into one if all of them are "missing"."""
    if any(found[name].status != "missing" for name in _GPU_CHECKS):
        return dict(found)
    detail = "; ".join(f"{name}: {found[name].detail}" for name in _GPU_CHECKS[:-1])
    others = {name: finding for name, finding in found.items() if name not in _GPU_CHECKS}
    return {**others, "GPUs": Finding("missing", detail, found["CUDA"].remedy)}


def as_text(found: Findings) -> str:
    """Return the report as text: a table, the remedies, and the verdict."""
    found = _grouped(found)
    width = max(map(len, found))
    lines = [f"{name:{width}}  {f.status:7}  {f.detail}" for name, f in found.items()]
    remedies = [f"{name:{width}}  {f.remedy}" for name, f in found.items() if f.remedy]
    if remedies:
        lines += ["", "What to do:", *remedies]
    ready = [f"{kind} {'yes' if yes else 'no'}" for kind, yes in readiness(found).items()]
    return "\n".join([*lines, "", f"Ready: {', '.join(ready)}"])
