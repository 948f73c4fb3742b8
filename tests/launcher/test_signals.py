"""Signals to ``tagi-ddp run``: those that its ranks get, and those that end them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
from support.processes import all_end

from tagi_ddp.launcher.failure import LaunchError
from tagi_ddp.launcher.launch import launch
from tagi_ddp.launcher.supervisor import _Team, supervise

LIMIT = 60
SENT = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def job(tmp_path, text, *options, ignored=(), arguments=()):
    """Start a script on two ranks, and yield its launcher once each has printed a line."""
    (tmp_path / "script.py").write_text(f"import os, signal, subprocess, sys, time\n{text}")

    def as_a_shell_starts_it():
        for number in SENT:
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    with subprocess.Popen(
        [sys.executable, "-m", "tagi_ddp", "run", *options, "script.py", *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=as_a_shell_starts_it,
    ) as process:
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines == ["[0] ready\n", "[1] ready\n"]
        yield process


HANDLES = """
got, child = [], subprocess.Popen(["sleep", "60"])
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: got.append(number))
print("ready")
while len(got) < 2:
    time.sleep(0.01)
print(sorted(got) == [signal.SIGUSR1, signal.SIGUSR2], child.poll())
child.kill()
"""


def test_the_process_of_each_rank_gets_user_signals_in_turn_and_its_children_none(tmp_path):
    with job(tmp_path, HANDLES) as process:
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
        output, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, errors) == (0, "")
    assert sorted(output.splitlines()) == ["[0] True None", "[1] True None"]


def test_a_rank_without_a_handler_dies_of_a_user_signal_and_is_restarted(tmp_path):
    text = """
rank = os.environ["RANK"]
first = not os.path.exists(rank)
open(rank, "w").close()
print("ready")
if first:
    time.sleep(60)
"""
    with job(tmp_path, text, "--max-restarts", "1") as process:
        process.send_signal(signal.SIGUSR2)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0
    assert "of 2 was killed by SIGUSR2; all ranks were ended, and start again\n" in errors


def test_ranks_that_start_later_get_a_user_signal_too(tmp_path):
    (tmp_path / "script.py").write_text("import time; time.sleep(60)")
    signals = [int(signal.SIGUSR1)]
    with pytest.raises(LaunchError, match="was killed by SIGUSR1"):
        supervise(["script", str(tmp_path / "script.py")], 2, LIMIT, signals=signals)
    assert signals == []


def test_launch_leaves_user_signals_to_its_process(monkeypatch):
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append("handled"))
    try:
        launch(lambda: os.kill(os.getppid(), signal.SIGUSR1), 1, timeout=LIMIT)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == ["handled"]


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_an_ignored_signal_stays_ignored(tmp_path, number):
    wait = "print('ready')\nwhile not os.path.exists('sent'): time.sleep(0.01)"
    with job(tmp_path, wait, ignored=[number]) as process:
        process.send_signal(number)
        (tmp_path / "sent").touch()
        _, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, errors) == (0, "")


def test_a_signal_that_comes_twice_leaves_ranks_the_time_to_save(tmp_path):
    save = """
def save(*_):
    time.sleep(0.5)
    open("saved" + os.environ["RANK"], "w").close()
    os._exit(0)

signal.signal(signal.SIGTERM, save)
print("ready")
time.sleep(60)
"""
    with job(tmp_path, save) as process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 129
    assert errors == "tagi-ddp: received SIGHUP; all ranks were ended\n"
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}


@pytest.mark.parametrize("times", [1, 2])
def test_a_second_interrupt_at_any_call_leaves_nothing(tmp_path, monkeypatch, times):
    def fn():
        (tmp_path / "child").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
        raise ValueError

    calls = [_Team.terminate, _Team.kill][:times]

    def wrapper_of(function, call):
        return lambda *arguments, **options: function(call, *arguments, **options)

    def interrupted(call, *arguments, **options):
        if call in calls:
            calls.remove(call)
            raise KeyboardInterrupt
        call(*arguments, **options)

    for call in list(calls):
        monkeypatch.setattr(_Team, call.__name__, wrapper_of(interrupted, call))
    with pytest.raises(KeyboardInterrupt):
        launch(fn, 1, timeout=LIMIT)
    assert calls == []
    assert all_end([(tmp_path / "child").read_text()])


SLOW_END = """
def save(*_):
    time.sleep(float(sys.argv[1]))
    open("saved" + os.environ["RANK"], "w").close()
    os._exit(0)

signal.signal(signal.SIGTERM, save)
print("ready")
time.sleep(60)
"""


@pytest.mark.parametrize(("grace", "takes", "saved"), [("0.3", "20", 0), ("30", "4", 2)])
def test_the_time_to_save_is_a_setting(tmp_path, grace, takes, saved):
    with job(tmp_path, SLOW_END, "--grace", grace, arguments=[takes]) as process:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    assert process.returncode == 143
    assert len(list(tmp_path.glob("saved*"))) == saved
