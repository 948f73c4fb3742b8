"""tagi_ddp.launch with real processes: results, failures, interrupts, output."""

import linecache
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from support.processes import is_running

from tagi_ddp.communicators.config import DDPConfig
from tagi_ddp.communicators.errors import PeerLost
from tagi_ddp.environment import detect
from tagi_ddp.launcher.failure import LaunchError
from tagi_ddp.launcher.launch import launch

LIMIT = 60.0


def wait_until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


# Results


def test_results_come_in_rank_order_and_from_env_sees_the_rank():
    def fn():
        time.sleep(0.2 * (detect().rank == 0))
        return DDPConfig.from_env("shm"), os.getpid(), detect().job

    results = launch(fn, 3, timeout=LIMIT)
    assert [config for config, _, _ in results] == [
        DDPConfig([0, 1, 2], "shm", rank, 3) for rank in range(3)
    ]
    assert len({pid for _, pid, _ in results} | {os.getpid()}) == 4
    (job,) = {job for _, _, job in results}
    assert job != launch(fn, 1, timeout=LIMIT)[0][2]


def test_closures_arguments_and_arrays_travel():
    offset = np.arange(1_000_000.0)
    results = launch(
        lambda a, *, b: (offset + a, b, detect().rank), 2, (1,), {"b": "text"}, timeout=LIMIT
    )
    for rank, (array, text, seen) in enumerate(results):
        np.testing.assert_array_equal(array, offset + 1)
        assert (text, seen) == ("text", rank)


def test_functions_of_the_engine_travel():
    from pytagi import manual_seed

    def seeded():
        from pytagi.nn import Linear

        manual_seed(7)
        return Linear(2, 3)._cpp_backend.mu_w

    first, second = launch(seeded)
    assert first == second


def test_torch_variables_and_threads_are_set(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    names += ["OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"]

    def fn():
        return [os.environ.get(name) for name in names]

    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    results = launch(fn, 2, timeout=LIMIT)
    for rank, values in enumerate(results):
        assert values[:-1] == [str(rank), "2", str(rank), "2", "127.0.0.1", threads, None]
    assert results[0][-1] == results[1][-1] != "0"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launch(fn, 1, timeout=LIMIT)[0][5] == "7"


def test_launch_from_a_thread_and_inside_a_rank():
    def inner():
        return detect().rank, detect().world_size

    def outer():
        return launch(inner, 2, timeout=LIMIT), detect().rank

    results = []
    thread = threading.Thread(target=lambda: results.append(launch(outer, 2, timeout=LIMIT)))
    thread.start()
    thread.join(LIMIT)
    assert results == [[([(0, 2), (1, 2)], 0), ([(0, 2), (1, 2)], 1)]]


# Failures


def test_a_failing_rank_ends_all_with_its_traceback(tmp_path):
    def fail_here():
        raise KeyError("lost key")

    def fn():
        (tmp_path / str(detect().rank)).write_text(str(os.getpid()))
        if detect().rank == 1:
            while not (tmp_path / "0").exists():
                time.sleep(0.01)
            fail_here()
        time.sleep(LIMIT)

    with pytest.raises(LaunchError, match="rank 1 of 2 failed") as caught:
        launch(fn, 2, timeout=LIMIT)
    error = caught.value
    assert (error.rank, error.exitcode) == (1, 1)
    assert error.traceback in str(error)
    assert re.search(r"test_launch.*in fn\n.*fail_here.*KeyError: 'lost key'", str(error), re.S)
    assert "rank_process" not in str(error)
    assert not is_running((tmp_path / "0").read_text())


@pytest.mark.parametrize(
    ("end", "text", "exitcode"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", -9),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "was killed by SIGSEGV", -11),
        (lambda: os.kill(os.getpid(), 40), "was killed by signal 40", -40),
        (lambda: os._exit(3), "ended with exit status 3", 3),
        (lambda: sys.exit(4), "ended with exit status 4", 4),
        (lambda: sys.exit(), "ended with exit status 0 before the function returned", 0),
    ],
)
def test_a_rank_that_ends_without_a_traceback(end, text, exitcode):
    def fn():
        if detect().rank == 1:
            end()
        time.sleep(LIMIT)

    with pytest.raises(LaunchError, match=f"^rank 1 of 2 {text}$") as caught:
        launch(fn, 2, timeout=LIMIT)
    assert (caught.value.rank, caught.value.exitcode) == (1, exitcode)


@pytest.mark.parametrize("chained", [False, True])
def test_a_lost_peer_is_not_reported_when_the_peers_own_error_is_known(chained, tmp_path):
    def fn():
        if detect().rank == 1:
            (tmp_path / "here").touch()
            time.sleep(0.2)
            raise ValueError("the cause")
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        try:
            raise PeerLost("rank 1 is gone", [1])
        except PeerLost as error:
            if chained:
                raise RuntimeError("step failed") from error
            raise

    with pytest.raises(LaunchError, match="the cause"):
        launch(fn, 2, timeout=LIMIT)


def test_a_lost_peer_is_reported_when_nothing_else_is_known():
    def fn():
        if detect().rank == 0:
            raise PeerLost("rank 1 is gone", [1])
        time.sleep(LIMIT)

    with pytest.raises(LaunchError, match=r"(?s)rank 0 of 2 failed.*PeerLost: rank 1 is gone"):
        launch(fn, 2, timeout=LIMIT)


@pytest.mark.slow
def test_a_killed_rank_comes_before_the_error_that_its_death_causes(tmp_path):
    def fn():
        if detect().rank == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        assert wait_until((tmp_path / "pid").exists)
        pid = (tmp_path / "pid").read_text()
        while is_running(pid):
            pass
        raise RuntimeError("connection reset")

    for _ in range(3):
        with pytest.raises(LaunchError, match="rank 1 of 2 was killed by SIGKILL"):
            launch(fn, 2, timeout=LIMIT)
        (tmp_path / "pid").unlink()


@pytest.mark.slow
def test_timeout_names_who_still_runs_and_ends_even_who_ignores_sigterm(tmp_path):
    def fn():
        if detect().rank == 1:
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(LIMIT)

    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2 were still running after 20"):
        launch(fn, 2, timeout=20)
    assert not is_running((tmp_path / "pid").read_text())


def test_a_rank_may_clean_up_before_it_is_ended(tmp_path):
    def fn():
        if detect().rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())
            try:
                (tmp_path / "ready").touch()
                time.sleep(LIMIT)
            finally:
                (tmp_path / "cleaned up").touch()
        assert wait_until((tmp_path / "ready").exists)
        raise ValueError

    with pytest.raises(LaunchError, match="rank 1 of 2 failed"):
        launch(fn, 2, timeout=LIMIT)
    assert (tmp_path / "cleaned up").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_what_the_ranks_started_is_gone_too(fails):
    def fn():
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({LIMIT})"])
        forked = os.fork()  # holds all of the rank's pipes open
        if forked == 0:
            time.sleep(LIMIT)
        pids = [child.pid, forked]
        if fails:
            raise ValueError(*pids)
        return pids

    if fails:
        with pytest.raises(LaunchError) as caught:
            launch(fn, 1, timeout=LIMIT / 2)
        pids = re.findall(r"ValueError: \((\d+), (\d+)\)", str(caught.value))[0]
    else:
        (pids,) = launch(fn, 1, timeout=LIMIT / 2)
    assert wait_until(lambda: not any(is_running(pid) for pid in pids), 5)


def test_what_cannot_be_pickled_is_named():
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"^fn cannot be sent.*lock.*inside fn"):
        launch(lambda: lock)
    with pytest.raises(TypeError, match=r"^args\[1\] cannot be sent"):
        launch(max, args=(1, lock))
    with pytest.raises(TypeError, match=r"^kwargs\['key'\] cannot be sent"):
        launch(max, kwargs={"default": 1, "key": lock})
    with pytest.raises(LaunchError, match="result, a lock, cannot be sent back"):
        launch(threading.Lock, 1, timeout=LIMIT)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"fn": 3}, TypeError, "fn must be a function, got 3"),
        ({"nprocs": 0}, ValueError, "nprocs must be at least 1, got 0"),
        ({"nprocs": 2.0}, TypeError, "nprocs must be an integer, got 2.0"),
        ({"args": "ab"}, TypeError, "args must be .*got 'ab'"),
        ({"args": 3}, TypeError, "args must be .*got 3"),
        ({"kwargs": [1]}, TypeError, r"kwargs must be .*got \[1\]"),
        ({"timeout": 0}, ValueError, "timeout must be .*got 0"),
        ({"timeout": "5"}, TypeError, "timeout must be a number, got '5'"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        launch(**{"fn": print, **arguments})


def test_tracebacks_show_the_source_of_notebook_cells():
    source = "def cell():\n    raise ValueError('in a cell')  # this line\n"
    name = "<cell 7>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {}
    exec(compile(source, name, "exec"), names)
    with pytest.raises(LaunchError, match="# this line"):
        launch(names["cell"], 1, timeout=LIMIT)


# Interrupts, with launch() in a process of its own

SCRIPT = """
import os, signal, sys, time
from tagi_ddp.launcher.launch import launch

def fn():
    if {stubborn}:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("pid", os.getpid())
    time.sleep(60)

launch(fn, 2)
"""


def start_script(tmp_path, stubborn=False):
    """Start SCRIPT and return it with its ranks' pids."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(stubborn=stubborn))
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    text = ""
    while text.count("\n") < 2:  # the ranks sleep now: a line must come before its rank ends
        assert select.select([process.stdout], [], [], 20)[0]
        text += os.read(process.stdout.fileno(), 1000).decode()
    return process, re.findall(r"pid (\d+)\n", text)


@pytest.mark.parametrize("stubborn", [False, True])
def test_one_keyboard_interrupt_ends_all(tmp_path, stubborn):
    process, pids = start_script(tmp_path, stubborn)
    with process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert not any(is_running(pid) for pid in pids)


def test_no_rank_outlives_a_killed_parent(tmp_path):
    process, pids = start_script(tmp_path, stubborn=True)
    with process:
        assert [is_running(pid) for pid in pids] == [True, True]
        process.kill()
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


# Output


def test_output_lines_are_whole_and_carry_the_rank(capsys):
    def fn():
        for i in range(300):
            print("out", i, "x" * 50)
            print("err", i, "y" * 50, file=sys.stderr)
        print("no newline at the end", end="")

    launch(fn, 2, timeout=LIMIT)
    captured = capsys.readouterr()
    for rank in range(2):
        mine = [line for line in captured.out.splitlines() if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] out {i} {'x' * 50}" for i in range(300)]
        assert mine == [*expected, f"[{rank}] no newline at the end"]
        mine = [line for line in captured.err.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] err {i} {'y' * 50}" for i in range(300)]
    assert len(captured.out.splitlines()) == 602
    assert len(captured.err.splitlines()) == 600


def test_output_goes_to_a_file_that_only_writes_and_flushes(monkeypatch):
    written = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=list))
    launch(lambda: print("hello"), 1, timeout=LIMIT)
    assert "".join(written) == "[0] hello\n"


def test_the_ranks_leave_nothing_to_warn_of(capsys, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "always::ResourceWarning")
    launch(print, 1, timeout=LIMIT)
    assert capsys.readouterr().err == ""


def test_a_progress_bar_stays_on_its_line(capsys, monkeypatch):
    monkeypatch.setenv("TAGI_DDP_TERMINAL", "1")

    def fn():
        from tagi_ddp.data import progress

        for _ in progress(range(3), mininterval=0, miniters=1):
            pass

    launch(fn, 2, timeout=LIMIT)
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    bars = [bar for bar in line.split("\r") if bar]
    assert all(bar.startswith("[0] ") for bar in bars)
    assert "3/3" in bars[-1]
