"""The examples, run as a user runs them."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.clients import write_mnist_files

from tagi_ddp.data import Reliability

EXAMPLES = Path(__file__).parents[2] / "examples"
LONGER = {"images.py": 210, "pictures.py": 150, "hybrid.py": 150}  # which scripts import
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
LAUNCHER = re.compile("TAGI_DDP_|OMPI_|PMIX_|PMI_|TORCHELASTIC_|(RANK|WORLD_SIZE)$")
MLP = ("--limit", 1409, "--epochs", 3)  # of the last batch, one image, rank 1 has none
CNN = ("--model", "cnn", "--epochs", 5)
PNG = b"\x89PNG\r\n\x1a\n"


def ranks(number):
    """Return how to run so many processes; one is started as users start it, without a launcher."""
    launcher = ["-m", "tagi_ddp", "run", "-n", str(number)]
    return [sys.executable, *(launcher if number > 1 else [])]


def at_once(function, *arguments):
    """Return the function's results. A single process alone would leave cores idle."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(function, arguments))


def run(*command, cwd, **environment):
    kept = {name: value for name, value in os.environ.items() if not LAUNCHER.match(name)}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=kept | environment,
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
    assert len(script.read_text().splitlines()) < LONGER.get(script.name, 100)


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """Return a function that classifies on one process and on two, once for each options."""
    folder = tmp_path_factory.mktemp("classified")

    @functools.cache
    def both(*options):
        return at_once(lambda processes: classify(ranks(processes), folder, *options), 1, 2)

    return both


@pytest.mark.parametrize("options", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.slow
def test_two_processes_classify_as_one(classified, options):
    (one, of_one), (two, of_two) = classified(*options)
    assert max(one, two) < 15
    if options is CNN:  # which torch computes: what it rounds otherwise has not grown yet at first
        (one, _), (two, _) = classified("--model", "cnn", "--epochs", 1)
        assert abs(one - two) < 1
    else:
        assert of_one == of_two


@pytest.mark.slow
def test_two_processes_train_a_resnet(tmp_path):
    error, _ = classify(ranks(2), tmp_path, "--model", "resnet", "--epochs", 4)
    assert error < 20


@pytest.mark.slow
def test_every_launcher_gives_the_same_network(tmp_path, classified):
    _, expected = classified(*MLP)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert classify(torchrun, tmp_path, *MLP) == expected
    assert classify(open_mpi(), tmp_path, *MLP) == expected


@pytest.mark.slow
def test_the_demo_compares(tmp_path):
    options = ("--model", "mlp", "--epochs", 2, "--limit", 400, "--batch-size", 64)
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


@pytest.mark.slow
def test_the_regression_is_calibrated_on_two_processes_as_on_one(tmp_path):
    def numbers(processes):
        plot = tmp_path / f"{processes}.png"
        options = ("--epochs", 4, "--plot", plot)
        output = run(*ranks(processes), EXAMPLES / "regression.py", *options, cwd=tmp_path).stdout
        assert plot.read_bytes().startswith(PNG)
        assert plot.stat().st_size > 5000
        summary = r"RMSE (\S+), mean log-likelihood (\S+)\n"
        intervals = [rf".*?([\d.]+)% of .* their {level}% interval\n" for level in (50, 90, 95)]
        return np.array(re.search(summary + "".join(intervals), output).groups(), float)

    one, two = at_once(numbers, 1, 2)
    rmse, log_likelihood, *shares = two
    assert rmse < 60  # 77 is the standard deviation
    assert log_likelihood > -5.6  # -5.77 with mean and standard deviation for everybody
    np.testing.assert_allclose(shares, [50, 90, 95], atol=5)
    np.testing.assert_allclose(two[:2], one[:2], rtol=1e-2)
    np.testing.assert_allclose(shares, one[2:], atol=0.5)


@pytest.mark.slow
def test_noise_is_learned_with_the_values(tmp_path):
    plot = tmp_path / "noise.png"
    output = run(*ranks(1), EXAMPLES / "noise.py", "--plot", plot, cwd=tmp_path).stdout
    rmse, likelihood, within = map(float, re.findall(r"-?\d+\.\d+", output)[:3])
    assert rmse < 60  # 77 is the standard deviation
    assert likelihood > -5.6  # -5.77 with mean and standard deviation for everybody
    assert 90 < within < 99
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_curve_is_learned_and_plotted(tmp_path):
    plot = tmp_path / "curve.png"
    output = run(*ranks(1), EXAMPLES / "curve.py", "--plot", plot, cwd=tmp_path).stdout
    (within,) = re.findall(r"(\d+)% of the test points", output)
    assert 80 < int(within) < 97
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_settings_are_compared(tmp_path):
    plot = tmp_path / "settings.png"
    options = ("--over", "width", "--seeds", 1, "--plot", plot)
    output = run(*ranks(1), EXAMPLES / "settings.py", *options, cwd=tmp_path).stdout
    errors = re.findall(r"error +([\d. ]+)\n", output)
    assert [len(line.split()) for line in errors] == [4] * 15  # sets times noises
    assert float(errors[2].split()[-1]) < 0.4  # ripples, by their own noise and the widest network
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_digits_are_learned_one_at_a_time(tmp_path):
    plot = tmp_path / "stream.png"
    output = run(*ranks(1), EXAMPLES / "stream.py", "--plot", plot, cwd=tmp_path).stdout
    right, expected = map(float, re.findall(r"([\d.]+)%", output))
    assert right > 90
    assert 60 < expected < right + 5
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_training_goes_on_while_processes_are_killed(tmp_path):
    launcher = [*ranks(3)[:-1], "3", "--max-restarts", "2"]
    done = run(*launcher, EXAMPLES / "elastic.py", "--kills", 2, "--epochs", 15, cwd=tmp_path)
    changes, error = re.search(
        r"(\d) changes; test error ([\d.]+)%; replicas", done.stdout
    ).groups()
    assert done.stderr.count("was killed by SIGKILL; the others go on, and a new one") == 2
    assert int(changes) >= 1
    assert float(error) < 12
    assert len(list(tmp_path.glob("elastic/*.csv"))) == 5
    assert (tmp_path / "elastic" / "elastic.png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_the_forecast_beats_last_years_numbers(tmp_path):
    plot = tmp_path / "forecast.png"
    output = run(*ranks(1), EXAMPLES / "forecast.py", "--plot", plot, cwd=tmp_path).stdout
    error, within = re.search(r"error ([\d.]+)%\n(\d+)% of the months", output).groups()
    assert float(error) < 14  # 15.5 by repeating the last year
    assert float(within) > 80
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_the_ensemble_has_a_member_for_each_group_of_processes(tmp_path):
    def numbers(processes, *options):
        """Return RMSE, log-likelihood and calibration error of one network, and of the ensemble."""
        plot = tmp_path / f"{processes}{len(options)}.png"
        options = ("--epochs", 2, "--plot", plot, *options)
        output = run(*ranks(processes), EXAMPLES / "ensemble.py", *options, cwd=tmp_path).stdout
        assert plot.read_bytes().startswith(PNG)
        assert plot.stat().st_size > 5000
        line = r"{}: RMSE (\S+), .*log-likelihood (\S+), calibration error (\S+)%\n"
        lines = (re.search(line.format(name), output) for name in ("one network", "ensemble"))
        return np.array([found.groups() for found in lines], float)

    one, two = at_once(numbers, 1, 2)
    pair = numbers(2, "--ranks-per-member", 2)
    digits = [0.11, 0.0011, 0.11]  # all agree; other roundings could change the last ones by one
    np.testing.assert_array_equal(one[0], one[1])
    alone, ensemble = two
    assert np.all(abs(alone - one[0]) < digits)  # the first member is always the same one
    assert ensemble[0] < alone[0]
    assert ensemble[1] > alone[1]
    assert np.all(abs(pair - one) < digits)


@pytest.mark.slow
def test_sharding_does_not_change_what_is_learnt(tmp_path):
    def columns(processes):
        output = run(*ranks(processes), EXAMPLES / "sharding.py", cwd=tmp_path).stdout
        rows = re.findall(r"step \d+: loss (\S+), (\S+) MB kept\n", output)
        return np.array(rows, float).T

    (losses, kept), (losses_2, kept_2) = at_once(columns, 1, 2)
    assert len(losses) == 4
    assert losses[0] > 2  # who knows nothing has log(10) = 2.3
    assert losses[-1] < 0.3
    # They agree to 1e-12, which training amplifies; a mistake in a gradient changes them by 1e-3.
    np.testing.assert_allclose(losses_2, losses, rtol=1e-9)
    assert np.all(kept_2 < 0.55 * kept)


@pytest.mark.slow
def test_every_way_of_merging_learns_and_keeps_replicas_equal(tmp_path):
    plot = tmp_path / "agreement.png"
    options = ("--epochs", 6, "--batch-size", 64, "--node-size", 1, "--plot", plot)
    output = run(*ranks(2), EXAMPLES / "merging.py", *options, cwd=tmp_path).stdout
    line = r"\[0\] (.*): test error (.*)%, .* s, replicas [0-9a-f]{8}\n"
    names, errors = zip(*re.findall(line, output), strict=True)
    merged = ("precision", "precision, every 8 steps", "precision, by a schedule")
    assert names == ("sum", *merged)
    assert max(map(float, errors)) < 20
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_step_of_two_processes_is_plotted(tmp_path):
    options = ("--limit", 300, "--epochs", 2)
    trace = tmp_path / "trace"
    script = EXAMPLES / "classification.py"
    run(*ranks(2), script, *options, cwd=tmp_path, TAGI_DDP_TRACE=str(trace))
    plot = tmp_path / "timeline.png"
    run(*ranks(1), EXAMPLES / "timeline.py", trace, "--plot", plot, cwd=tmp_path)
    assert plot.read_bytes().startswith(PNG)


def test_the_step_of_a_timeline_is_that_of_median_length(tmp_path):
    import timeline

    def event(rank, name, begin, end):
        times = {"ts": 1e3 * begin, "dur": 1e3 * (end - begin)}
        return {"ph": "X", "name": name, "pid": rank, "tid": rank, **times}

    ends = [0, 10, 13, 18]  # steps of rank 0 take 10, 3 and 5 ms; rank 1 ends each 1 ms later
    steps = [event(rank, "step", end - 2, end + rank) for rank in (1, 0) for end in ends]
    path = tmp_path / "trace.json"
    named = {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "rank 0"}}
    path.write_text(json.dumps([named, *steps, event(1, "forward", 14, 15)]))
    threads = timeline.read(path)
    assert [rank for rank, _ in threads] == [0, 1]
    assert ("forward", 14, 15) in threads[1, 1]
    assert timeline.median_step(threads) == (13, 19)


def test_a_calibration_shows_the_ideal_and_the_band_of_chance(tmp_path, monkeypatch):
    import pictures  # which imports matplotlib

    drawn = []
    save = pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure))
    levels = np.array([0.5, 0.9])
    pictures.calibration(tmp_path / "plot.png", levels, {"network": levels - 0.1}, 400)
    above, below = drawn[0].axes
    ideal, network = above.lines
    assert (ideal.get_label(), network.get_label()) == ("ideal", "network")
    np.testing.assert_array_equal(ideal.get_xdata(), ideal.get_ydata())
    np.testing.assert_allclose(network.get_xydata(), [[50, 40], [90, 80]])
    for axes, middle in (above, 50), (below, 0):
        corners = axes.collections[0].get_paths()[0].vertices
        at_half = sorted(set(corners[corners[:, 0] == 50, 1]))
        np.testing.assert_allclose(at_half, [middle - 5, middle + 5])  # 2 sqrt(0.5 * 0.5 / 400)
    save(drawn[0], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_reliability_shows_the_band_of_chance_of_each_bin(tmp_path, monkeypatch):
    import pictures

    drawn = []
    monkeypatch.setattr(pictures, "save", lambda figure, path: drawn.append(figure))
    counts, confidence = np.array([0, 400]), np.array([np.nan, 0.8])
    bins = Reliability(counts, confidence, np.array([np.nan, 0.7]))
    pictures.reliability(tmp_path / "plot.png", {"network": bins})
    (axes,) = drawn[0].axes
    np.testing.assert_allclose(axes.lines[1].get_xydata(), [[0.8, 0.7]])
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([heights.min(), heights.max()], [0.76, 0.84])


@pytest.mark.slow
def test_mnist_on_two_processes(tmp_path):
    write_mnist_files(tmp_path / "data", {"train": 2000, "t10k": 500})
    plot = tmp_path / "reliability.png"
    options = ("--data-dir", tmp_path / "data", "--epochs", 8, "--plot", plot)
    output = run(*ranks(2), EXAMPLES / "mnist.py", *options, cwd=tmp_path).stdout
    (error,) = re.findall(r"test error (.*)%, log-likelihood -\d\.\d+ nats, calib", output)
    assert float(error) < 30
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_tourism_on_two_processes(tmp_path):
    plot = tmp_path / "tourism.png"
    options = ("--series", 6, "--epochs", 40, "--seeds", 1, "--plot", plot)
    output = run(*ranks(2), EXAMPLES / "tourism.py", *options, cwd=tmp_path).stdout
    ((deviation, scaled),) = re.findall(r"ND (.*), MASE (.*), 95 % coverage", output)
    assert float(deviation) < 0.16  # that of the seasonal naive
    assert float(scaled) < 2.4
    assert plot.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_daso_trains_a_torch_network_on_two_nodes(tmp_path):
    options = ("--epochs", 4, "--node-size", 1)
    output = run(*ranks(2), EXAMPLES / "daso.py", *options, cwd=tmp_path).stdout
    (error,) = re.findall(r"test error (.*)%", output)
    assert float(error) < 20


def learn_task(arguments, cwd):
    """Return loss and test error in percent, which rank 0 prints."""
    number, options = arguments
    folder = cwd / f"{number} {' '.join(options)}"
    folder.mkdir()
    done = run(*ranks(number), EXAMPLES / "trainer.py", "epochs=3", *options, cwd=folder)
    ((processes, loss, error),) = re.findall(
        r"(\d) process\(es\): loss (.*), test error (.*)%", done.stdout
    )
    assert int(processes) == number
    assert (folder / "runs" / "checkpoints" / "latest" / "run.json").is_file()
    return float(loss), float(error)


@pytest.mark.parametrize("model", ["torch", "tagi"])
@pytest.mark.slow
def test_trainer_gives_the_results_of_one_process(model, tmp_path):
    runs = [(1, [f"model={model}"]), (2, [f"model={model}", "parallel.use_fsdp=true"])]
    one, two = at_once(functools.partial(learn_task, cwd=tmp_path), *runs)
    assert max(one[1], two[1]) < 15
    assert abs(one[0] - two[0]) < 1e-3
    assert abs(one[1] - two[1]) < 1
