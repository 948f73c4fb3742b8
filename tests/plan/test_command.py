"""The command: its table, units, options, errors and plot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tagi_ddp.commands.main import main
from tagi_ddp.plan import SCHEMES, Cluster, Link, Training, default_ranks, table

PLAN = ["plan", "--step-ms", "12", "--parameters", "11e6"]


def test_units(capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "--ranks": "4,64",
        "--ranks-per-node": "2",
        "--node-latency-us": "3",
        "--node-gbs": "5",
        "--latency-us": "70",
        "--gbit": "8",
        "--sync-every": "3",
        "--batches": "50",
        "--epochs": "9",
        "--blocking-epochs": "2",
        "--merge-ns": "0.5",
        "--bits": "16",
    }
    assert main([*PLAN, *(word for option in options.items() for word in option)]) == 0
    training = Training(0.012, 11e6, 3, 50, 9, 0.5e-9, warmup_epochs=2, cooldown_epochs=0, bits=16)
    cluster = Cluster(Link(3e-6, 5e9), Link(70e-6, 1e9), 2)
    assert capsys.readouterr().out == table(training, cluster, [4, 64]) + "\n"


def test_help_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PLAN) == 0
    cluster = Cluster(Link(1e-6, 10e9), Link(20e-6, 25e9 / 8), 4)
    expected = table(Training(0.012, 11e6), cluster, default_ranks())
    assert capsys.readouterr().out == expected + "\n"
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for default in ("link; default: 4", "node; default: 1.0", "direction; default: 25.0"):
        assert default in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--step-ms", "0"], "argument --step-ms: must be a number greater than 0, got '0'"),
        (["--parameters", "inf"], "--parameters: must be a number greater than 0, got 'inf'"),
        (["--gbit", "fast"], "argument --gbit: must be a number greater than 0, got 'fast'"),
        (["--latency-us=-1"], "argument --latency-us: must be a number from 0 up, got '-1'"),
        (["--ranks", "4,0"], "argument --ranks: must be an integer from 1 up, got '0'"),
        (["--blocking-epochs=-1"], "--blocking-epochs: must be an integer from 0 up, got '-1'"),
        (["--epochs", "1.5"], "argument --epochs: must be an integer from 1 up, got '1.5'"),
    ],
)
def test_wrong_options_are_named(
    words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, *words])
    assert text in capsys.readouterr().err


def test_step_and_parameters_are_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan"])
    assert "required: --step-ms, --parameters" in capsys.readouterr().err


def test_it_loads_neither_torch_nor_mpi(tmp_path: Path) -> None:
    code = f"import sys; from tagi_ddp.commands.main import main; main({PLAN}); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert "tagi_ddp.plan.model" in loaded
    assert not loaded & {"torch", "mpi4py", "pytagi", "matplotlib"}


def test_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.svg"
    assert main([*PLAN, "--plot", str(path)]) == 0
    assert "efficiency" in capsys.readouterr().out
    text = path.read_text()
    assert "<svg" in text
    assert all(f"<!-- {word} -->" in text for word in (*SCHEMES, "ms per step", "efficiency in %"))


@pytest.mark.parametrize(
    ("options", "ranks", "milliseconds"),
    [
        ("--ranks 1,4,16,64", "1 2 4 8 16 32 64", "10 20 50 100"),
        ("", "1 4 16 64 256 1024 4096", "10 20 50 100"),
        ("--ranks 3", "3", "10 20 50"),
        ("--ranks 1", "1", "10 20"),
        ("--step-ms 0.1 --ranks 1,2", "1 2", "0.1 0.2 0.5 1 2 5 10"),
        ("--step-ms 2e-5 --ranks 1", "1", "0.00002 0.00005"),
        ("--step-ms 1e-4 --ranks 1,2", "1 2", "0.0001 0.001 0.01 0.1 1 10"),
    ],
)
def test_the_ticks_of_a_plot_are_plain_numbers(
    tmp_path: Path, options: str, ranks: str, milliseconds: str
) -> None:
    path = tmp_path / "plan.svg"
    assert main([*PLAN, *options.split(), "--plot", str(path)]) == 0
    texts = re.findall(r"<!-- (.*) -->", path.read_text())  # in the order of drawing
    words = " ".join(texts)
    assert words.startswith(f"{ranks} ranks {milliseconds} ms per step Time of a step")
    assert f"step sum precision asynchronous {ranks} ranks 0 20 40 60 80 100 efficiency" in words


def test_a_plot_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*PLAN, "--plot", str(tmp_path / "missing" / "plan.png")]) == 1
    assert "No such file" in capsys.readouterr().err
    assert main([*PLAN, "--plot", str(tmp_path / "plan.xyz")]) == 1
    assert "plan.xyz: Format 'xyz' is not supported" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*PLAN, "--plot", str(tmp_path / "plan.png")]) == 1
    assert "needs matplotlib: pip install matplotlib" in capsys.readouterr().err


def test_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--step-ms", "36", "--parameters", "1000", "--ranks", "1", "--hours", "1"]
    cluster = ["--ranks-per-node", "4", "--shares", "1e6"]
    assert main([*given, *cluster]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("1,000,000 shares within 1 h: 12 ranks, 3 nodes, by sum: 0.8")
    assert main([*given, *cluster, "--memory-gb", "1e-9"]) == 0
    assert "1e-09 GB: no number of ranks up to 10,000 keeps" in capsys.readouterr().out
    assert main(given) == 2
    assert "needs both --hours and --shares" in capsys.readouterr().err
