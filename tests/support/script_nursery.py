"""A process that has imported what is slow, and forks ranks that run scripts.

Each rank is a process of its own in the folder of its script, with the variables that `tagi-ddp
run` sets. ``python tests/support/script_nursery.py`` reads a line [script, ranks] at a time, and
answers with the ranks' exit statuses; what rank r prints goes to ``rank<r>.txt`` beside the script.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from support.rank_pool import free_port, worker_environment

LIMIT = 100.0  # seconds for all ranks of a script


class ScriptNursery:
    """The process, as the tests see it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=worker_environment({"PYTHONPATH": str(Path(__file__).parents[1])}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group to end
        )

    def run(self, script: Path, ranks: int) -> list[str]:
        """Run the script, and return what each rank has printed; AssertionError if one failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(script), ranks]), file=self._process.stdin, flush=True)
        timer = threading.Timer(LIMIT, self.kill)
        timer.start()
        answer = self._process.stdout.readline()
        timer.cancel()
        printed = [script.with_name(f"rank{rank}.txt").read_text() for rank in range(ranks)]
        assert answer, f"not through within {LIMIT} s: {printed}"
        assert json.loads(answer) == [0] * ranks, "\n".join(printed)
        return printed

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._process.communicate()


def serve() -> None:
    for name in ("torch", "torch._dynamo", "lightning.pytorch", "pytagi", "tagi_ddp.parallel"):
        with contextlib.suppress(ImportError):
            __import__(name)
    gc.freeze()  # so that the children do not copy what nobody collects
    for number, line in enumerate(sys.stdin):
        script, ranks = json.loads(line)
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        job["TAGI_DDP_JOB"] = f"{os.getpid()}-{number}"
        pids = [fork(Path(script), rank, ranks, job) for rank in range(ranks)]
        print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids], flush=True)


def fork(script: Path, rank: int, ranks: int, job: dict[str, str]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            run(script, rank, ranks, job)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return pid


def run(script: Path, rank: int, ranks: int, job: dict[str, str]) -> None:
    with script.with_name(f"rank{rank}.txt").open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    if ranks > 1:
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        for name, value in place.items():
            os.environ[name] = os.environ[f"TAGI_DDP_{name}"] = str(value)
        os.environ.update(job)
    os.chdir(script.parent)
    sys.argv = [script.name]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    sys.path.remove(str(Path(__file__).parent))  # modules here are named support.<name>
    serve()
