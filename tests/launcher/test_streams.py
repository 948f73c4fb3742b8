"""Jobs with stdin, stdout or stderr closed, and with output that cannot be written."""

from __future__ import annotations

import errno
import io
import itertools
import os
import subprocess
import sys

import pytest
from support.processes import all_end

from tagi_ddp.launcher.rank_output import Output, RankStream, Screen

LIMIT = 60
RANK = 'import sys; print("out", flush=True); print("err", file=sys.stderr); open("done", "w")'
LAUNCH = f"""
from tagi_ddp.launcher.launch import launch

def rank(text):
    exec({RANK!r})
    return text * 2

if __name__ == "__main__":
    assert launch(rank, 1, ["ab"]) == ["abab"]
"""
SUBSETS = [set(s) for n in (1, 2, 3) for s in itertools.combinations(range(3), n)]


def close(descriptors):
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("way", ["run", "launch"])
def test_any_of_the_standard_streams_may_be_closed(tmp_path, way):
    commands = {"run": ["-m", "tagi_ddp", "run", "-n", "1", "rank.py"], "launch": ["launch.py"]}
    jobs = []
    for closed in SUBSETS:
        folder = tmp_path / "".join(map(str, closed))
        folder.mkdir()
        (folder / "rank.py").write_text(RANK)
        (folder / "launch.py").write_text(LAUNCH)
        with (folder / "1").open("w") as out, (folder / "2").open("w") as err:
            process = subprocess.Popen(
                [sys.executable, *commands[way]],
                cwd=folder,
                stdout=out,
                stderr=err,
                preexec_fn=lambda closed=closed: close(closed),
            )
        jobs.append((closed, folder, process))
    for closed, folder, process in jobs:
        assert process.wait(LIMIT) == 0, (closed, (folder / "2").read_text())
        assert (folder / "done").exists(), closed
        assert (folder / "1").read_text() == ("" if 1 in closed else "[0] out\n"), closed
        assert (folder / "2").read_text() == ("" if 2 in closed else "[0] err\n"), closed


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_to_a_full_disk_ends_all_ranks_which_may_save(tmp_path, stream):
    (tmp_path / "rank.py").write_text(f"""
import os, signal, subprocess, sys, time

def save(*_):
    time.sleep(0.2)
    print("saved", flush=True)
    open("saved" + os.environ["RANK"], "w").close()
    os._exit(0)

signal.signal(signal.SIGTERM, save)
child = subprocess.Popen(["sleep", "60"])
with open("new" + os.environ["RANK"], "w") as file:
    file.write(str(child.pid))
os.rename(file.name, "child" + os.environ["RANK"])  # whole, as the other rank may end this one then
while len([name for name in os.listdir() if name.startswith("child")]) < 2:
    time.sleep(0.01)
print("out", file=sys.{stream}, flush=True)
time.sleep(60)
""")
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: full}
        done = subprocess.run(
            [sys.executable, "-m", "tagi_ddp", "run", "rank.py"],
            cwd=tmp_path,
            text=True,
            timeout=LIMIT,
            check=False,
            **streams,
        )
    assert done.returncode == 2
    text = "tagi-ddp: what the ranks print cannot be written to <stdout>: No space left on device\n"
    assert done.stderr == (text if stream == "stdout" else None)
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1"}
    assert all_end([path.read_text() for path in tmp_path.glob("child*")])


def test_output_that_fails_keeps_its_error_and_others_are_written():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "it is full")

    screen, full, other = Screen(), Output(Full()), io.StringIO()
    for file in (full, Output(None), Output(other)):
        stream = RankStream(screen, 0, file)
        stream.feed(b"\r 10%")
        stream.feed(b"\r 20%\nline\n")
        stream.feed(b"")
    assert full.error.errno == errno.ENOSPC
    assert "it is full" in str(full.error)
    assert other.getvalue() == "\r[0]  10%\r[0]  20%\n[0] line\n"
