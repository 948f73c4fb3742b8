"""``tagi-ddp run --nnodes``: one job of the launchers of several hosts, here all on one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tagi_ddp.launcher import nodes
from tagi_ddp.launcher.host import reserve_port
from tagi_ddp.launcher.nodes import Nodes

Start = Callable[..., "subprocess.Popen[str]"]
ELASTIC = Path(__file__).parents[1] / "support" / "elastic_rank.py"
COMMAND = Path(sys.executable).with_name("tagi-ddp")
SCRIPT = """
import os, sys, time
import numpy as np, tagi_ddp

with tagi_ddp.init() as comm:
    total = np.ones(4)
    comm.all_reduce(total)
    place = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "TAGI_DDP_JOB")]
    print("at", comm.backend, comm.rank, int(total[0]), *place, flush=True)
    if "once" in sys.argv and comm.rank == 2 and not os.path.exists("failed"):
        open("failed", "w").close()
        os._exit(7)
    comm.barrier()
if "later" in sys.argv and comm.rank:
    time.sleep(1.5)
    print("ends later", flush=True)
"""


@pytest.fixture
def port() -> Iterator[int]:
    with closing(reserve_port(one_host=False)) as holder:
        yield holder.getsockname()[1]


@pytest.fixture
def start(tmp_path: Path, port: int) -> Iterator[Start]:
    (tmp_path / "script.py").write_text(SCRIPT)
    with ExitStack() as stack:

        def start(
            node: int,
            ranks: int,
            *arguments: str,
            options: Sequence[str] = (),
            script: str = "script.py",
        ) -> subprocess.Popen[str]:
            where = ["--nnodes", "2", "--node-rank", str(node), "--rendezvous", f"localhost:{port}"]
            process = subprocess.Popen(
                [COMMAND, "run", "-n", str(ranks), *where, *options, script, *arguments],
                cwd=tmp_path,
                env={**os.environ, "TAGI_DDP_SECRET": "ours", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def outputs(*processes: subprocess.Popen[str]) -> list[str]:
    return [process.communicate(timeout=60)[0] for process in processes]


PLACE = """
import os

place = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TAGI_DDP_JOB")
print("at no_backend", *(os.environ[name] for name in place))
"""


@pytest.mark.parametrize(
    ("script", "backend"),
    [("place.py", "no_backend"), pytest.param("script.py", "gloo", marks=pytest.mark.slow)],
)
def test_ranks_of_all_nodes_are_one_job(
    start: Start, tmp_path: Path, script: str, backend: str
) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    first, second = start(0, 1, script=script), start(1, 2, script=script)
    texts = outputs(first, second)
    assert (first.returncode, second.returncode) == (0, 0), texts
    lines = [
        sorted(line.split() for line in text.splitlines() if "] at " in line) for text in texts
    ]
    (job,) = {line[-1] for node in lines for line in node}
    assert lines == [
        [["[0]", "at", backend, "0", "3", "0", "1", job]],
        [
            ["[1]", "at", backend, "1", "3", "0", "2", job],
            ["[2]", "at", backend, "2", "3", "1", "2", job],
        ],
    ]


@pytest.mark.slow
def test_node_0_waits_for_the_others(start: Start) -> None:
    first, second = start(0, 1, "later"), start(1, 1, "later")
    texts = outputs(first, second)
    assert (first.returncode, second.returncode) == (0, 0), texts
    assert "ends later" in texts[1]


WAITS = """
import os, sys, time

print("here", flush=True)
if os.environ["RANK"] in sys.argv:
    raise ValueError("the cause")
time.sleep(60)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> str:
    """A script whose ranks wait, but for one that fails."""
    (tmp_path / "waits.py").write_text(WAITS)
    return "waits.py"


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_fails_ends_those_of_all_nodes(start: Start, waiting: str, rank: int) -> None:
    processes = [start(node, 2 - node, str(rank), script=waiting) for node in (1, 0)]
    texts = outputs(*processes)
    assert [process.returncode for process in processes] == [1, 1], texts
    assert all(f"rank {rank} failed first; all ranks were ended" in text for text in texts), texts
    assert sum("ValueError: the cause" in text for text in texts) >= 1


@pytest.mark.slow
def test_all_nodes_start_again(start: Start) -> None:
    """One attempt more, in which rank 2 does not fail any more."""
    processes = [start(node, 2, "once", options=["--max-restarts", "1"]) for node in (1, 0)]
    texts = outputs(*processes)
    assert [process.returncode for process in processes] == [0, 0], texts
    for text in texts:
        assert "rank 2 of 4 ended with exit status 7; all ranks were ended, and start" in text
        assert text.count("at gloo") == 4


def elastic_ranks(
    start: Start, folder: Path, restarts: int, **what: object
) -> list[subprocess.Popen[str]]:
    case = {"backend": "auto", "options": {"average": False}, "network": "mlp", **what}
    options = ["--max-restarts", str(restarts)]
    arguments = (2, str(folder), json.dumps(case))
    return [start(node, *arguments, options=options, script=str(ELASTIC)) for node in (0, 1)]


@pytest.mark.slow
def test_an_elastic_job_on_two_nodes_goes_on_and_is_joined(start: Start, tmp_path: Path) -> None:
    what = {"kills": {"0": 5, "3": 5}, "await": 4, "epochs": 40}
    processes = elastic_ranks(start, tmp_path, 1, **what)
    texts = outputs(*processes)
    assert [process.returncode for process in processes] == [0, 0], texts
    for rank, text in zip((0, 3), texts, strict=True):
        assert f"rank {rank} was killed by SIGKILL; the others go on, and a new one" in text
    answers = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [answer["number"] for answer in answers] == [0, 1, 2, 3]
    assert {(a["hash"], a["steps"], a["backend"]) for a in answers} == {
        (answers[0]["hash"], 480, "gloo")
    }
    assert [answer["changes"][-1]["size"] for answer in answers] == [4] * 4


@pytest.mark.slow
def test_an_elastic_job_outlives_a_host(start: Start, tmp_path: Path) -> None:
    processes = elastic_ranks(start, tmp_path, 0, **{"await": 5, "epochs": 20})
    while len(list(tmp_path.glob("*.begun"))) < 4:
        time.sleep(0.05)
        assert processes[0].poll() is None
    processes[1].kill()
    (text,) = outputs(processes[0])
    assert processes[0].returncode == 0, text
    assert "rank 2 was lost with its host: the launcher of node 1 has gone; the others" in text
    answers = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]
    assert [(a["number"], a["backend"], a["changes"][-1]["size"]) for a in answers] == [
        (0, "shm", 2),
        (1, "shm", 2),
    ]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_launcher_ends_the_others_ranks(start: Start, waiting: str, lost: int) -> None:
    processes = [start(node, 1, script=waiting) for node in (0, 1)]
    for process in processes:
        assert process.stdout is not None
        assert "here" in process.stdout.readline()
    processes[lost].send_signal(signal.SIGKILL)
    text = outputs(processes[1 - lost])[0]
    assert processes[1 - lost].returncode == 1
    assert f"rank {lost} of 2 was lost with its host: the launcher of node {lost}" in text


def test_nodes_that_do_not_come_are_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_SECRET", "ours")
    monkeypatch.setattr(nodes, "_CONNECT", 0.3)
    for node, absent in ((0, [1, 2]), (1, [0])):
        with (
            closing(Nodes(3, node, ("localhost", port))) as launcher,
            pytest.raises(
                TimeoutError, match=rf"nodes \{absent} of 3 did not connect".replace("]", r"\]")
            ),
        ):
            launcher.join(1, 1)


def test_a_launcher_tells_for_whom_it_waits(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_SECRET", "ours")
    monkeypatch.setattr(nodes, "_CONNECT", 0.7)
    monkeypatch.setattr(nodes, "_REPORT", 0.2)
    monkeypatch.setattr(nodes, "_SLICE", 0.05)
    for node, text in (
        (0, f"node 0 waits for nodes 1, 2 at port {port}"),
        (1, f"node 1 waits for node 0 at localhost, port {port}"),
    ):
        lines: list[str] = []
        launcher = Nodes(3, node, ("localhost", port), report=lines.append)
        with closing(launcher), pytest.raises(TimeoutError):
            launcher.join(1, 1)
        assert lines == [text] * len(lines)
        assert 2 <= len(lines) <= 4


@pytest.mark.parametrize("other", [{"version": "99.0.0"}, {}])
def test_versions_that_differ_are_refused(
    port: int, other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all launchers, also one of the same version that has come before."""
    monkeypatch.setenv("TAGI_DDP_SECRET", "ours")
    where, version = ("localhost", port), nodes.package_version()
    with ThreadPoolExecutor(3) as threads, ExitStack() as stack:
        launchers = [stack.enter_context(closing(Nodes(3, node, where))) for node in range(3)]
        joins = [threads.submit(launcher.join, 1, 1) for launcher in launchers[:2]]
        while not launchers[0]._others:
            time.sleep(0.01)
        launchers[2]._call(time.monotonic() + 10)
        launchers[2]._send(0, {"ranks": 1, "job": "", **other})
        text = f", but node 0 has {version}: install the same version"
        assert (
            f"node 2 has tagi_ddp {other.get('version', nodes.EARLIER)}{text}"
            in launchers[2]._receive(0)["refused"]
        )
        for each in joins:
            with pytest.raises(ConnectionRefusedError, match=text):
                each.result(30)


def test_a_launcher_that_waits_to_start_its_job_again_is_let_into_no_other(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAGI_DDP_SECRET", "ours")
    where = ("localhost", port)
    with ThreadPoolExecutor(3) as threads, ExitStack() as stack:

        def join(node: int, job: str = "") -> Future[nodes.HostAssignment]:
            launcher = stack.enter_context(closing(Nodes(3, node, where, job)))
            return threads.submit(launcher.join, 1, 1)

        first = [join(node) for node in range(3)]
        job = first[0].result(30).job
        first[0], first[1] = join(0), join(1)  # another job
        with pytest.raises(ConnectionRefusedError, match="leads another job than the one that"):
            join(2, job).result(30)
        first[2] = join(2)
        assert len({each.result(30).job for each in first} - {job}) == 1
        # The same job starts again, on one host by a new launcher.
        again = [join(0, job), join(1, job), join(2)]
        assert [each.result(30).first for each in again] == [0, 1, 2]


@pytest.mark.slow
def test_another_secret_is_another_job(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_CONNECT", 2)
    monkeypatch.setenv("TAGI_DDP_SECRET", "theirs")
    first = start(0, 1)
    with closing(Nodes(2, 1, ("localhost", port))) as stranger, pytest.raises(TimeoutError):
        stranger.join(5, 1)
    assert first.poll() is None
    assert outputs(first, start(1, 1))[0].count("at gloo 0 2") == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--nnodes", "2", "--node-rank", "0"], "--nnodes 2 needs --rendezvous"),
        (["--nnodes", "2", "--rendezvous", "a:1"], "--nnodes 2 needs --node-rank"),
        (["--nnodes", "2", "--node-rank", "2", "--rendezvous", "a:1"], "from 0 to 1"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a"], "must be HOST:PORT, got 'a'"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:70000"], "must be HOST:PORT"),
        (["--node-rank", "0"], "--node-rank needs --nnodes"),
        (["--nnodes", "1", "--node-rank", "1", "--rendezvous", "a:1"], "from 0 to 0"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "[::1]:9"], "TAGI_DDP_SECRET"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: list[str], text: str) -> None:
    (tmp_path / "script.py").write_text("")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TAGI_DDP_SECRET")}
    done = subprocess.run(
        [COMMAND, "run", *arguments, "script.py"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert text in done.stderr


def test_one_node_needs_no_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('ran')")
    where = ["--nnodes", "1", "--node-rank", "0", "--rendezvous", "nowhere:1"]
    command = [COMMAND, "run", "-n", "1", *where, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "[0] ran\n"


def test_a_port_that_is_taken_is_named(start: Start, port: int) -> None:
    with socket.create_server(("", port)):
        process = start(0, 1)
        assert f"node 0 cannot listen at port {port}" in outputs(process)[0]
        assert process.returncode == 2
