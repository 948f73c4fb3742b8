"""TAGI_DDP_TRACE: one file a job, in which every rank's events are, whatever happens to a rank."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.trace.timeline import append, timeline, traced

COMMAND = Path(sys.executable).with_name("tagi-ddp")
SCRIPT = """
import os, sys, time
import numpy as np
import pytagi
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential
from tagi_ddp import DDPConfig, DDPSequential

config = DDPConfig.from_env(backend=sys.argv[1])
options = eval(sys.argv[2])
updater = OutputUpdater("cpu")
with DDPSequential(Sequential(Linear(4, 8), ReLU(), Linear(8, 1)), config, **options) as model:
    for step in range(3):
        model(np.ones(8, np.float32))
        if config.rank == 0:
            open(f"there{step}", "w").close()
        else:
            while not os.path.exists(f"there{step}"):
                time.sleep(0.01)
            time.sleep(0.5)
        updater.update(
            model.output_z_buffer, np.ones(2, np.float32), np.ones(2, np.float32),
            model.input_delta_z_buffer,
        )
        model.backward()
        model.step()
    if sys.argv[3:] and config.rank == 1:
        raise ValueError("the end")
    model.barrier()
"""


def run(tmp_path: Path, *arguments: str, status: int = 0) -> dict[int, list[dict[str, Any]]]:
    """Return the events of each of two ranks."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [COMMAND, "run", "-n", "2", "script.py", *arguments],
        cwd=tmp_path,
        # With 0 ranks over gloo do not use the memory of their host.
        env={**os.environ, "TAGI_DDP_TRACE": "traces/here", "TAGI_DDP_TWO_LEVELS": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == status, done.stderr
    (path,) = (tmp_path / "traces" / "here").iterdir()
    events = json.loads(path.read_text())
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(name.split(" on ")[0] for name in names) == ["rank 0", "rank 1"]
    return {
        rank: [event for event in events if event["pid"] == rank and event["ph"] == "X"]
        for rank in range(2)
    }


@pytest.mark.parametrize(
    ("backend", "options", "within"),
    [
        pytest.param("shm", "{}", {"waiting", "reducing and applying"}, marks=pytest.mark.slow),
        ("shm", "{'compute': 'engine'}", {"waiting", "reducing and applying"}),
        pytest.param(
            "shm", "{'sharded': True}", {"waiting", "reducing and applying"}, marks=pytest.mark.slow
        ),
        pytest.param(
            "gloo",
            "{'sharded': True}",
            {"waiting", "reducing", "gathering"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "shm",
            "{'reduction': 'precision'}",
            {"waiting", "applying", "merging"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_rank_tells_what_it_does_in_a_step(
    tmp_path: Path, backend: str, options: str, within: set[str]
) -> None:
    for rank, events in run(tmp_path, backend, options).items():
        steps = [event for event in events if event["name"] == "step"]
        for name in ("forward", "backward", "step"):
            assert sum(event["name"] == name for event in events) == 3
        for step in steps:
            parts = [
                event
                for event in events
                if event is not step
                and step["ts"] <= event["ts"]
                and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1
            ]
            assert {part["name"] for part in parts} == within
            waited = sum(part["dur"] for part in parts if part["name"] == "waiting")
            # Rank 1 comes half a second later to each step.
            assert rank == 1 or waited > 100_000


def test_a_rank_that_fails_tells_what_it_did(tmp_path: Path) -> None:
    found = run(tmp_path, "shm", "{}", "fail", status=1)
    steps = [[event["name"] for event in found[rank]].count("step") for rank in range(2)]
    assert steps[0] >= 2  # the launcher's signal may end it in the third
    assert steps[1] == 3


def test_nothing_is_wrapped_without_the_variable() -> None:
    assert timeline is None

    def function() -> None: ...

    assert traced("name")(function) is function


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "from tagi_ddp.trace.timeline import timeline, traced\nprint = traced('name')(print)\n"
    code += "print('ran')\ntimeline.write()\nprint('again')\nassert not timeline._events\n"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TAGI_DDP_TRACE": str(tmp_path / "file")},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout == "ran\nagain\n"
    assert done.stderr.count("no timeline is written") == 1


def test_ranks_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    context = get_context("spawn")
    ranks = [context.Process(target=_append_objects, args=(path, rank)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    found = [(event["rank"], event["number"]) for event in json.loads(path.read_text())]
    assert sorted(found) == [(rank, number) for rank in range(3) for number in range(50)]


def _append_objects(path: Path, rank: int) -> None:
    for number in range(50):
        append(path, [json.dumps({"rank": rank, "number": number}).encode()])


@given(cut=st.integers(0, 400), lengths=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_what_a_killed_rank_has_left_whole_is_kept(
    tmp_path_factory: pytest.TempPathFactory, cut: int, lengths: list[int]
) -> None:
    path = tmp_path_factory.mktemp("trace") / "job.json"
    events = iter(range(100))
    for length in lengths:
        append(path, [json.dumps({"event": next(events)}).encode() for _ in range(length)])
    written = path.read_bytes()
    path.write_bytes(written[: len(written) - cut % len(written)])
    kept = path.read_bytes().count(b"},\n") + path.read_bytes().endswith(b"}\n]\n")
    append(path, [b'{"event": 1000}'])
    found = [event["event"] for event in json.loads(path.read_text())]
    assert found == [*range(kept), 1000]


@pytest.mark.parametrize("mode", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_lock_that_another_process_holds_keeps_no_rank(tmp_path: Path, mode: int) -> None:
    """Ranks write into files of their own; then a signal ends one at once."""
    held = tmp_path / "traces" / "job.json"
    held.parent.mkdir()
    held.write_bytes(b'[\n{"event": 0}\n]\n')
    code = "import os, signal, time\nfrom tagi_ddp.trace.timeline import timeline, traced\n"
    code += "time.sleep = None  # training never waits\n"
    code += "function = traced('name')(lambda: None)\n"
    code += "for _ in range(2):\n    function()\n    timeline.write()\n"
    code += "function()\nos.kill(os.getpid(), signal.SIGTERM)\n"
    with open(held, "rb") as file:
        fcntl.flock(file, mode)
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "TAGI_DDP_TRACE": str(held.parent), "TAGI_DDP_JOB": "job"}
            | {f"TAGI_DDP_{name}RANK": "1" for name in ("", "LOCAL_")}
            | {f"TAGI_DDP_{name}WORLD_SIZE": "2" for name in ("", "LOCAL_")},
            capture_output=True,
            timeout=30,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (-signal.SIGTERM, b"")
    assert json.loads(held.read_text()) == [{"event": 0}]
    (own,) = held.parent.glob("job-rank1-*.json")
    names = [event["name"] for event in json.loads(own.read_text())]
    assert names == ["process_name", "thread_name", "name", "name", "name"]
