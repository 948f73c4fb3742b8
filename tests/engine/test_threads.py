"""The locks of threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own: a fork that waits for ever is ended with it.
SCRIPT = """
import os, signal, sys, threading
from tagi_ddp.engine.locks import new_lock

lock, holds, may_go = new_lock(), threading.Event(), threading.Event()

def hold():
    with lock:
        holds.set()
        may_go.wait(60)

def fork():
    child = os.fork()
    if not child:
        signal.alarm(30)
        with lock, lock:
            os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("free" if status == 0 else f"status {status}")

if sys.argv[1] == "own":
    with lock:
        fork()
else:
    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait(60)
    fork()
    may_go.set()
    thread.join(60)
"""


@pytest.mark.parametrize("holder", ["own", "other"])
def test_a_lock_is_free_in_a_fork(holder: str) -> None:
    command = [sys.executable, "-c", SCRIPT, holder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.stdout == "free\n", done.stderr
