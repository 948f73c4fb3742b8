"""The examples, run as a user runs them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LAUNCHER = re.compile("TAGI_DDP_|OMPI_|PMIX_|PMI_|TORCHELASTIC_|(RANK|WORLD_SIZE)$")
RUN_2 = [sys.executable, "-m", "tagi_ddp", "run", "-n", "2"]


def run(*command, cwd):
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if not LAUNCHER.match(name)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


def classify(launcher, cwd, *options):
    """Return the test error in percent and the replicas' hash, which rank 0 alone prints."""
    done = run(*launcher, EXAMPLES / "classification.py", *options, cwd=cwd)
    ((error, replicas),) = re.findall(
        r"test error (.*)%; the replicas are equal: (.*)", done.stdout
    )
    assert "training error" in done.stderr
    return float(error), replicas


def open_mpi():
    """Return how to run two ranks under Open MPI's mpirun, preferably this environment's."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    mpirun = shutil.which("mpirun", path=os.pathsep.join(folders))
    if mpirun is None:
        pytest.skip("there is no mpirun")
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [mpirun, *as_root, "--oversubscribe", "-n", "2", sys.executable]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short(script):
    assert len(script.read_text().splitlines()) < 100


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_two_processes_classify_as_well_as_one(tmp_path, model):
    options = ("--model", model, "--epochs", 5)
    two, _ = classify(RUN_2, tmp_path, *options)
    one, _ = classify([sys.executable], tmp_path, *options)
    assert max(one, two) < 15
    assert abs(one - two) < 2


def test_two_processes_train_a_resnet(tmp_path):
    error, _ = classify(RUN_2, tmp_path, "--model", "resnet", "--epochs", 4)
    assert error < 20


def test_every_launcher_gives_the_same_network(tmp_path):
    options = ("--limit", 193, "--epochs", 2)  # of the last batch, one image, rank 1 has none
    expected = classify(RUN_2, tmp_path, *options)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert classify(torchrun, tmp_path, *options) == expected
    assert classify(open_mpi(), tmp_path, *options) == expected
    assert classify([sys.executable], tmp_path, *options) != expected


def test_the_demo_compares(tmp_path):
    options = ("--model", "mlp", "--epochs", 2, "--limit", 400)
    output = run(sys.executable, EXAMPLES / "demo.py", *options, cwd=tmp_path).stdout
    rows = re.findall(r"^(.*\S) +([\d.]+) s +([\d.]+) +([\d.]+)%$", output, re.MULTILINE)
    titles, _, speedups, errors = zip(*rows, strict=True)
    assert titles == (
        "the engine, 1 process, 1 thread",
        "torch, 1 process, 1 thread",
        "torch, 1 process, 2 threads",
        "torch, 2 processes, 1 thread each",
    )
    assert max(map(float, errors)) < 40
    assert max(map(float, errors)) - min(map(float, errors)) < 3
    assert speedups[0] == "1.0"
    first, second = re.search("equal bit for bit: (.*) = (.*)", output).groups()
    assert first == second
    assert float(re.search(r"differ by (\S+) of", output)[1]) < 1e-5


def test_the_regression_is_calibrated_on_two_processes_as_on_one(tmp_path):
    def numbers(*launcher):
        plot = tmp_path / f"{len(launcher)}.png"
        output = run(*launcher, EXAMPLES / "regression.py", "--plot", plot, cwd=tmp_path).stdout
        assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert plot.stat().st_size > 5000
        summary = r"RMSE (\S+), mean log-likelihood (\S+)\n"
        intervals = [rf".*?([\d.]+)% of .* their {level}% interval\n" for level in (50, 90, 95)]
        return np.array(re.search(summary + "".join(intervals), output).groups(), float)

    two, one = numbers(*RUN_2), numbers(sys.executable)
    rmse, log_likelihood, *shares = two
    assert rmse < 60  # 77 is the standard deviation
    assert log_likelihood > -5.6  # -5.77 with mean and standard deviation for everybody
    np.testing.assert_allclose(shares, [50, 90, 95], atol=5)
    np.testing.assert_allclose(two[:2], one[:2], rtol=1e-2)
    np.testing.assert_allclose(shares, one[2:], atol=0.5)


def test_the_notebook_runs(tmp_path):
    path = EXAMPLES / "notebook.ipynb"
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "[0] epoch 12 of 12" in text
    assert float(re.search(r"test error ([\d.]+)%", text)[1]) < 10
    assert float(re.search(r"after  1 epochs: (\S+)", text)[1]) < 1e-3
    assert any("image/png" in output.get("data", {}) for output in outputs)
