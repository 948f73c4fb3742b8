"""Run all that needs a GPU, the most telling first, and report it as it comes.

``make gpu`` runs this with an interpreter that has a torch with CUDA, and without a network; ``make
gpu-wheels`` collects what that takes. Python's own library must do, as the package is not installed
before the first step.

Two files hold the report, which is whole at any moment: what a kill cuts short, it says. With
``--rest`` a run goes on from the report of an earlier one: it takes what has no result, or failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build" / "gpu"  # the environment, what is built, and each step's output
PYTHON = str(WORK / "venv" / "bin" / "python")
BUDGET = 480.0  # seconds for everything
GRACE = 5.0  # of them, for a step to end when it is told to, or to begin at all
TAIL = 3000  # characters of a step's output that the report keeps

# What builds the package, what it needs as pyproject.toml says, and what tests it.
BUILD = ("scikit-build-core>=0.11", "nanobind>=2.7", "cmake", "ninja")
NEEDS = (
    "numpy>=1.24",
    "pytagi>=0.2.1,<0.3; python_version < '3.13'",
    "cloudpickle>=3.0",
    "tqdm>=4.60",
    "safetensors>=0.5",
)
TEST = ("pytest>=8.0", "pytest-xdist>=3.5", "hypothesis>=6.100")
# At a time: more only take turns at the GPU.
WORKERS = 3
# Theirs for Python 3.10: pip leaves them out when a later one collects.
BACKPORTS = ("exceptiongroup", "tomli", "typing-extensions")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")

INSTALL, DOCTOR, TESTS, ROWS = "install", "doctor", "tests", "rows"
COMPUTE, NCCL, SEQUENTIAL = "tests/compute", "tests/communicators/nccl", "tests/sequential"
# Steps that are refused, calls of several threads and in any order, and resumes.
SILENT = tuple(f"{SEQUENTIAL}/test_{name}.py" for name in ("rollback", "threads", "any_order"))
SILENT = (*SILENT, "tests/checkpoint/test_resume.py")
# Kind, of what, and the seconds that it may take at most.
STEPS = (
    (INSTALL, "the package", 150),
    (DOCTOR, "what is there", 45),
    # No machine so far has reached the end of the contract, and none has begun with the next ones.
    (TESTS, f"{NCCL}/test_nccl_device.py {NCCL}/test_nccl.py", 240),
    (ROWS, "gpu_steps", 75),
    (ROWS, "gpu_exchange", 60),
    (TESTS, " ".join(SILENT), 120),
    (TESTS, f"{COMPUTE}/test_gpu.py {COMPUTE}/test_device.py {COMPUTE}/test_step_graphs.py", 60),
    (TESTS, f"{SEQUENTIAL}/test_nccl.py", 90),
    (TESTS, "tests/parallel/test_nccl.py", 150),
    (TESTS, "tests/torch_backend/test_gpu.py", 60),
    (TESTS, "tests/project/test_docs.py", 45),
    (ROWS, "gpu_calls", 60),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="a folder of wheels")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "gpu.json")
    parser.add_argument("--seconds", type=float, default=BUDGET, help="for everything")
    parser.add_argument("--rest", action="store_true", help="go on from the report there is")
    parser.add_argument("--collect", metavar="3.12", help="only collect wheels, for this Python")
    options = parser.parse_args()
    if options.collect:
        return collect(options.wheels, options.collect)
    earlier: dict[str, Any] | None = None
    if not options.rest:
        shutil.rmtree(WORK, ignore_errors=True)
    elif options.report.exists():
        earlier = json.loads(options.report.read_text())
    else:
        parser.error(f"--rest: there is no report in {options.report}: run without --rest first")
    WORK.mkdir(parents=True, exist_ok=True)
    report = Report(options.report, options.seconds, earlier)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        for step in report.steps:
            lost = step["kind"] == INSTALL and not Path(PYTHON).exists()
            if step["state"] != "done" or lost:
                run(step, report, options.wheels.resolve())
            if step["kind"] == INSTALL and step["state"] != "done":
                break
    except (KeyboardInterrupt, SystemExit):
        report.end("ended early, by a signal")
        return 143
    report.end("finished")
    print(report.text())
    return 0 if report.complete() else 1


class Report:
    """The report so far, in two files: ``path``, JSON, and the same as text beside it."""

    def __init__(self, path: Path, seconds: float, earlier: dict[str, Any] | None) -> None:
        """Begin one, with what is done of an ``earlier`` one."""
        self.path = path.resolve()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._begin = time.monotonic()
        self._limit = seconds
        self.steps: list[dict[str, Any]] = [
            {"kind": kind, "of": of, "limit": limit, "state": "has not begun", "results": []}
            for kind, of, limit in STEPS
        ]
        for step in self.steps:
            for other in earlier["steps"] if earlier else ():
                if (step["kind"], step["of"]) == (other["kind"], other["of"]):
                    take_over(step, other)
        self._content: dict[str, Any] = {
            "state": "not finished: running, or ended without a word",
            "machine": f"{platform.node()}, Python {platform.python_version()} of {sys.prefix}",
            "commit": commit(),
            "began": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "limit": seconds,
            "earlier": [*earlier["earlier"], heading(earlier)] if earlier else [],
            "steps": self.steps,
        }
        self.write()

    def left(self) -> float:
        """Return the seconds that are left."""
        return self._begin + self._limit - time.monotonic()

    def end(self, state: str) -> None:
        self._content["state"] = state
        self.write()

    def complete(self) -> bool:
        """Return whether everything ran and nothing failed."""
        return all(step["state"] == "done" and not any(missing(step)) for step in self.steps)

    def write(self) -> None:
        """Replace both files, each at once."""
        self._content["seconds"] = round(self._limit - self.left(), 1)
        for path, text in (
            (self.path, json.dumps(self._content, indent=1) + "\n"),
            (self.path.with_suffix(".txt"), self.text()),
        ):
            new = path.with_name(f".{path.name}.new")
            new.write_text(text)
            new.replace(path)

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        content = self._content
        yield f"{content['state']}; {content['seconds']} s of {content['limit']:g} s"
        yield heading(content)
        yield from (f"goes on from: {line}" for line in content["earlier"])
        for number, step in enumerate(self.steps, 1):
            counts = Counter(result["outcome"] for result in step["results"])
            parts = [step["state"], *(f"{count} {outcome}" for outcome, count in counts.items())]
            if "seconds" in step:
                parts.append(f"{step['seconds']} s")
            yield ""
            yield f"{number}. {step['kind']}, {step['of']}: {', '.join(parts)}"
            for result in step["results"]:
                if "row" in result:
                    yield f"   {line_of(result['row'])}"
                elif result["outcome"] == "failed":
                    yield f"   failed: {result['name']}: {last_line(result['why'])}"
            if step["kind"] == DOCTOR or step["state"] not in ("done", "has not begun"):
                yield from (f"   | {line}" for line in step.get("output", "").splitlines())
        yield ""
        found = [f"- {line}" for step in self.steps for line in missing(step)]
        yield from ["Missing:", *found] if found else ["Nothing is missing."]


def heading(content: dict[str, Any]) -> str:
    return f"{content['machine']}; commit {content['commit']}; began {content['began']}"


def take_over(step: dict[str, Any], earlier: dict[str, Any]) -> None:
    """Take over from an earlier run of a step: all of it, or its tests that did not fail."""
    kept = [result for result in earlier["results"] if result["outcome"] != "failed"]
    tests = earlier.get("tests", [])
    if earlier["state"] == "done" or (tests and {*tests} <= {result["name"] for result in kept}):
        step.update(earlier, state="done")
    elif step["kind"] == TESTS:
        step.update(results=kept, tests=tests)


def run(step: dict[str, Any], report: Report, wheels: Path) -> None:
    """Run a step within its limit and that of everything; what it writes is merged as it comes."""
    limit = min(step["limit"], report.left() - GRACE)
    if limit < GRACE:
        step["state"] = "not begun: no time was left"
        report.write()
        return
    step["state"] = "running"
    begin = time.monotonic()
    name = f"{report.steps.index(step) + 1}"
    log, results = WORK / f"{name}.log", WORK / f"{name}.results"
    for old in (log, results):
        old.unlink(missing_ok=True)
    if step["kind"] == TESTS:
        earlier = [{"tests": step.get("tests", [])}, *step["results"]]
        results.write_text("".join(f"{json.dumps(entry)}\n" for entry in earlier))
    report.write()
    state = "ended early"
    try:
        for command, environment in commands(step, results, wheels):
            rest = limit - (time.monotonic() - begin)
            with log.open("ab") as file:
                status = watch(
                    # Of the system: it ends all processes of the step, even if nobody is left here.
                    ["timeout", f"--kill-after={GRACE:.0f}", f"{max(rest, 1):.0f}", *command],
                    {**os.environ, **environment},
                    file,
                    lambda: merge(step, report, log, results, begin),
                )
            if status != 0:
                state = "out of time" if status in (124, 137) else f"failed with status {status}"
                break
        else:
            state = "done"
    finally:
        step["state"] = state
        merge(step, report, log, results, begin)


def watch(command: Sequence[str], environment: dict[str, str], file: Any, look: Any) -> int:
    """Run a command, and ``look`` every second; end it when this process is told to end."""
    output = {"stdout": file, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **output) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(1)
                look()
        finally:
            process.terminate()


def merge(step: dict[str, Any], report: Report, log: Path, results: Path, begin: float) -> None:
    """Take over what a step has written so far."""
    step["seconds"] = round(time.monotonic() - begin, 1)
    step["output"] = log.read_text(errors="replace")[-TAIL:] if log.exists() else ""
    if results.exists():
        read = read_outcomes if step["kind"] == TESTS else read_rows
        read(step, results.read_text())
    report.write()


def read_outcomes(step: dict[str, Any], text: str) -> None:
    """Read what `harness.outcomes` writes; the last line may be incomplete."""
    entries = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    step["results"] = [entry for entry in entries if "outcome" in entry]
    tests = [test for entry in entries for test in entry.get("tests", ())]
    step["tests"] = list(dict.fromkeys(tests))


def read_rows(step: dict[str, Any], text: str) -> None:
    step["results"] = [
        {
            "name": row["name"],
            "outcome": "missing" if row["missing"] else "measured",
            "why": "; ".join(dict.fromkeys(row["missing"])),
            "row": row,
        }
        for row in json.loads(text)
    ]


def missing(step: dict[str, Any]) -> Iterator[str]:
    """Say what of a step there is no result of, and why."""
    title = f"{step['kind']}, {step['of']}"
    if step["state"] != "done":
        yield f"{title}: {step['state']}"
    why = Counter(r["why"] for r in step["results"] if r["outcome"] in ("skipped", "missing"))
    yield from (f"{title}: {count} for: {reason}" for reason, count in why.items())
    known = {result["name"] for result in step["results"]}
    yield from (f"no result of {test}" for test in step.get("tests", ()) if test not in known)


def commands(
    step: dict[str, Any], results: Path, wheels: Path
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the commands of a step, with their environments."""
    kind, of = step["kind"], step["of"]
    if kind == INSTALL:
        yield from install(wheels)
    elif kind == DOCTOR:
        yield [PYTHON, "-m", "tagi_ddp", "doctor", "--gpu"], {}
    elif kind == ROWS:
        yield [PYTHON, "-m", "benchmarks", of, "--output", str(results)], {}
    else:
        # Plugins of the interpreter, and warnings of a torch that is new to us, are not what is
        # tested here.
        options = ["-p", "benchmarks.harness.outcomes", "--outcomes", str(results)]
        options += ["-p", "no:cacheprovider", "-W", "default", "-m", "gpu", "--tb=short"]
        options += ["-p", "xdist.plugin", "-n", str(WORKERS), "--dist", "loadscope"]
        options += [f"--deselect={result['name']}" for result in step["results"]]
        options += of.split()
        yield [PYTHON, "-m", "pytest", *options], {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def install(wheels: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Make an environment of the wheels, in which this interpreter's packages can be imported.

    They are named by path, since `--system-site-packages` shows nothing of an interpreter that is
    that of an environment itself; and pip is a wheel, since some have none.
    """
    yield [sys.executable, "-m", "venv", "--without-pip", str(WORK / "venv")], {}
    packages = [entry for entry in sys.path if entry.endswith("-packages")]
    (site,) = (WORK / "venv" / "lib").glob("python*/site-packages")
    (site / "interpreter.pth").write_text("".join(f"{entry}\n" for entry in packages))
    pips = {"PYTHONPATH": os.pathsep.join(map(str, wheels.glob("pip-*.whl")))}
    pip = [
        PYTHON,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "install",
        "--no-index",
    ]
    pip += ["--find-links", str(wheels)]
    yield [*pip, *BUILD, *TEST], pips
    build = f"build-dir={WORK / 'build'}"
    yield [*pip, "--no-build-isolation", "-C", build, "--editable", str(ROOT)], pips


def collect(wheels: Path, version: str) -> int:
    """Collect wheels for another machine with this version of Python."""
    command = [sys.executable, "-m", "pip", "download", "--dest", str(wheels)]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", version]
    command += [f"--platform={platform}_x86_64" for platform in PLATFORMS]
    status = subprocess.call([*command, "pip", *BUILD, *NEEDS, *TEST, *BACKPORTS])
    print(f"{sum(wheel.stat().st_size for wheel in wheels.glob('*.whl')) >> 20} MiB in {wheels}")
    return status


def commit() -> str:
    """Return the commit that is checked out, if git tells."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.check_output(
            command, cwd=ROOT, text=True, stderr=subprocess.DEVNULL
        ).strip()
    return "unknown"


def line_of(row: dict[str, Any]) -> str:
    if row["missing"]:
        return f"{row['name']}: missing"
    target = "" if row["target"] is None else f", target {row['target']:.3g}"
    if target:
        target += " met" if row["ratio"] >= row["target"] else " missed"
    figures = f"{row['ours']:.4g} against {row['other']:.4g} {row['unit']}"
    return f"{row['name']}: {figures}, times {row['ratio']:.3g}{target}"


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("E ")), "".join(lines[-1:]))


if __name__ == "__main__":
    sys.exit(main())
