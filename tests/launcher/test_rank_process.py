"""A rank reports its end to its launcher. A process that it forks does not."""

import os
import sys

import pytest

from tagi_ddp.launcher.launch import launch


@pytest.mark.parametrize(
    ("end", "exitcode", "text"),
    [
        (lambda: 1 / 0, 1, "ZeroDivisionError"),
        (lambda: sys.exit(4), 4, ""),
        (lambda: sys.exit("no more"), 1, "no more"),
        (lambda: None, 0, ""),
    ],
)
def test_what_a_rank_forks_does_not_speak_for_it(capsys, end, exitcode, text):
    def fn():
        pid = os.fork()
        if pid == 0:
            return end()
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert launch(fn, 1, timeout=60) == [exitcode]
    assert text in capsys.readouterr().err
