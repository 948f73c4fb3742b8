"""One progress bar, one line: what people see of many ranks."""

import io
import re
import subprocess
import sys

import pytest

from tagi_ddp.data import log, progress
from tagi_ddp.launcher.launch import launch


@pytest.fixture
def second_rank(monkeypatch):
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(f"TAGI_DDP_{name}", str(value))


@pytest.mark.parametrize("terminal", ["0", "1"])
def test_progress_is_shown_on_rank_0_only(capsys, monkeypatch, terminal):
    monkeypatch.setenv("TAGI_DDP_TERMINAL", terminal)
    for rank in (0, 1):
        bar = progress(range(3), rank=rank, desc=f"rank {rank}")
        assert [(i, bar.set_postfix(error=i))[0] for i in bar] == [0, 1, 2]
    shown = capsys.readouterr().err
    assert "rank 0: " in shown
    assert "3/3" in shown
    assert "rank 1" not in shown
    if terminal == "0":
        assert len(shown.splitlines()) == 2  # though each postfix asked for more
        assert "error=2" in shown


def test_the_launcher_says_which_rank_it_is(capsys, second_rank):
    list(progress("abc"))
    list(progress("abc", rank=0, disable=True))
    log("not here")
    log("here", 1, sep="-", rank=0)
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == "here-1\n"


def test_in_a_file_progress_is_some_whole_lines(capsys):
    """Not each of a thousand states; neither return nor bar."""
    for _ in progress(range(1000), desc="training"):
        pass
    shown = capsys.readouterr().err
    assert "\r" not in shown
    lines = shown.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("training: 0/1000 [")
    assert re.fullmatch(r"training: 1000/1000 \[\d\d:\d\d<00:00, .*it/s\]", lines[1])


def test_its_options_are_tqdms(capsys):
    list(progress(iter("abc"), mininterval=0, miniters=1, desc="letters"))
    lines = capsys.readouterr().err.splitlines()
    counts = [re.match(r"letters: (\d)/\? \[", line)[1] for line in lines]
    assert sorted(set(counts)) == ["0", "1", "2", "3"]


def test_a_terminal_has_a_bar(capsys, monkeypatch):
    monkeypatch.setenv("TAGI_DDP_TERMINAL", "1")
    list(progress(range(3), mininterval=0, miniters=1))
    assert "100%|" in capsys.readouterr().err.split("\r")[-1]


def test_a_line_comes_above_the_bar(capsys, monkeypatch):
    monkeypatch.setenv("TAGI_DDP_TERMINAL", "1")
    for number in progress(range(2), mininterval=0):
        log("number", number)
    captured = capsys.readouterr()
    assert captured.out.replace("\r", "") == "number 0\nnumber 1\n"


SCRIPT = """
import sys
from tqdm import tqdm
from tagi_ddp import log, progress
for _ in progress(range(2000), desc="ours"):
    pass
if "theirs" in sys.argv:
    for _ in tqdm(range(50), desc="theirs", mininterval=0):
        pass
log("done")
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_ranks_know_what_their_launcher_writes_to(tmp_path, terminal):
    """A file has no frames of a bar, of another's, too; a terminal has."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2", "script.py"]
    if terminal:  # of `script`'s making
        command = ["script", "-qec", " ".join(command), "/dev/null"]
    else:
        command.append("theirs")
    text = subprocess.check_output(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, timeout=60
    ).decode()
    assert text.count("] done") == 1
    assert ("\r[0] ours: 100%|" in text) == terminal
    if not terminal:
        assert "\r" not in text
        assert len([line for line in text.splitlines() if "ours" in line]) == 2
        assert len([line for line in text.splitlines() if line.startswith("[0] theirs")]) == 1


def test_launch_passes_it_on(capsys):
    def fn():
        from tagi_ddp.data import progress

        for _ in progress(range(500), mininterval=0, miniters=1):
            pass

    launch(fn, 2, timeout=60)
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("[0] ") for line in lines)
    assert "500/500" in lines[-1]


def test_closed_streams_get_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    file = io.StringIO()
    assert list(progress(range(3), rank=0)) == list(progress(range(3), rank=0, file=file))
    assert "3/3" in file.getvalue()
    log("nowhere", rank=0)
