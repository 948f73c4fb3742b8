"""Functions and classes of a script reach the ranks, from whatever process the script runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import enum, functools, multiprocessing
from dataclasses import dataclass
from typing import Generic, TypeVar
import tagi_ddp
from .other import BASE

T = TypeVar("T")

class Color(enum.Enum):
    RED = 1

@dataclass
class Box(Generic[T]):
    value: T

    def get(self):
        return shifted(self.value)

    @classmethod
    def make(cls, value):
        return cls(value)

class Larger(Box):
    def get(self):
        return super().get() + 1

    class Inner:
        def color(self):
            return Color.RED

def shifted(value, by=0):
    return value + BASE + by

def closure(value):
    def inner():
        return shifted(value)
    return inner

def launched_in_a_rank():
    return tagi_ddp.launch(shifted, 1, (3,))

def found():
    calls = [
        functools.partial(shifted, 1), closure(2), lambda: shifted(3), Box(4).get, Larger(4).get,
        functools.partial(Box.make, 6), Larger.Inner().color, launched_in_a_rank,
    ]
    (results,) = tagi_ddp.launch(lambda calls: [call() for call in calls], 1, (calls,))
    return results

def put(queue):
    queue.put(found())

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=put, args=(queue,))
        process.start()
        assert queue.get(timeout=60) == [41, 42, 43, 44, 45, Box(6), Color.RED, [43]]
        process.join()
"""


@pytest.mark.parametrize("as_module", [pytest.param(True, marks=pytest.mark.slow), False])
def test_from_a_process_that_multiprocessing_has_started(tmp_path: Path, as_module: bool) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("BASE = 40")
    script = package / "script.py"
    script.write_text(SCRIPT if as_module else SCRIPT.replace(".other", "package.other"))
    command = ["-m", "package.script"] if as_module else [str(script)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
