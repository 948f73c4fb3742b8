"""The command tagi-ddp, run as a user runs it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import all_end
from support.resumes import RESUMES

import tagi_ddp

COMMAND = [Path(sys.executable).with_name("tagi-ddp")]


def run(*arguments, **options):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,
    )


def script(tmp_path, *lines):
    path = tmp_path / "train.py"
    path.write_text(
        "import os, signal, sys, time\nfrom tagi_ddp.communicators.config import DDPConfig\n"
        "rank = DDPConfig.from_env().rank\n" + "\n".join(lines) + "\n"
    )
    return path


def test_a_script_runs_on_each_rank_as_python_runs_it(tmp_path):
    (tmp_path / "beside.py").write_text("value = 7")
    path = script(
        tmp_path,
        "import beside",
        "config = DDPConfig.from_env()",
        "print(config.rank, config.world_size, __name__, __file__, sys.argv[1:], beside.value)",
    )
    done = run("run", "-n", 3, path, "-n", "5", "--timeout", "x", "--", "y")
    assert done.returncode == 0, done.stderr
    rest = f"3 __main__ {path} ['-n', '5', '--timeout', 'x', '--', 'y'] 7"
    assert sorted(done.stdout.splitlines()) == [f"[{r}] {r} {rest}" for r in range(3)]


def test_what_the_ranks_print_appears_in_the_users_encoding(tmp_path):
    path = script(tmp_path, "print('\\u00e9 \\u2192')")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = run("run", "-n", 1, path, env=environment, encoding="latin-1")
    assert (done.returncode, done.stdout) == (0, "[0] \u00e9 \\u2192\n"), done.stderr


def test_a_module_runs_on_two_ranks_by_default(tmp_path):
    (tmp_path / "job.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = run("run", "-m", "job", "--flag", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{r}] __main__ ['--flag']" for r in range(2)]


def test_a_failing_rank_ends_all_with_its_traceback(tmp_path):
    path = script(tmp_path, "if rank == 1: raise ValueError('boom')", "time.sleep(60)")
    done = run("run", path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert lines[1].startswith(f'[1]   File "{path}", line 4')
    assert "[1] ValueError: boom" in lines
    assert lines[-1] == "tagi-ddp: rank 1 failed first; all ranks were ended"


@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 of 2 was killed by SIGKILL"),
        ("sys.exit(7)", 7, "rank 1 of 2 ended with exit status 7"),
        ("sys.exit('no data')", 1, "[1] no data"),
        ("raise SyntaxError('bad')", 1, "[1] SyntaxError: bad"),
    ],
)
def test_the_exit_status_is_the_first_failing_ranks(tmp_path, line, status, text):
    done = run("run", script(tmp_path, f"if rank == 1: {line}", "time.sleep(60)"))
    assert done.returncode == status
    assert text in done.stderr


GLOO = """
import atexit, os, signal, sys, time
import numpy as np
from tagi_ddp import init
with init("gloo", timeout=20) as comm:
    for step in range(200):
        if step == 50 and comm.rank == 0:
            {end}
        comm.all_reduce(np.ones(300_000))
"""


@pytest.mark.parametrize(
    ("end", "status", "text"),
    [
        pytest.param(
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 0 of 2 was killed by SIGKILL",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "sys.exit(5)", 5, "rank 0 of 2 ended with exit status 5", marks=pytest.mark.slow
        ),
        pytest.param(
            "atexit.register(time.sleep, 6); sys.exit(5)",
            5,
            "rank 0 of 2 ended with exit status 5",
            marks=pytest.mark.slow,
        ),
        ("raise ValueError('a mistake')", 1, "rank 0 failed first"),
    ],
)
def test_the_cause_counts_and_not_what_gloo_makes_of_it(tmp_path, end, status, text):
    path = tmp_path / "script.py"
    path.write_text(GLOO.format(end=end))
    done = run("run", path)
    assert text in done.stderr
    assert done.returncode == status


def test_what_a_rank_does_at_its_exit_is_done(tmp_path):
    at_exit = "import atexit; atexit.register(lambda: (time.sleep(1), print('saved')))"
    done = run("run", script(tmp_path, f"if rank == 1: {at_exit}; sys.exit(3)", "time.sleep(60)"))
    assert done.returncode == 3
    assert "[1] saved" in done.stdout


@pytest.mark.slow
def test_an_exit_for_the_loss_of_another_rank_is_not_the_cause(tmp_path):
    path = tmp_path / "script.py"
    call = "comm.all_reduce(np.ones(300_000))"
    handled = f"try:\n            {call}\n        except OSError: sys.exit(9)"
    text = GLOO.replace(call, handled)
    path.write_text(text.format(end="atexit.register(time.sleep, 2); sys.exit(5)"))
    done = run("run", "-n", 3, path)
    assert "rank 0 of 3 ended with exit status 5" in done.stderr
    assert done.returncode == 5


def test_a_clean_exit_is_no_failure(tmp_path):
    assert run("run", script(tmp_path, "if rank == 1: sys.exit()")).returncode == 0


def test_the_timeout_ends_all(tmp_path):
    done = run("run", "--timeout", 6, script(tmp_path, "if rank == 1: time.sleep(60)"))
    assert done.returncode == 124
    assert "tagi-ddp: ranks [1] of 2 were still running after 6 seconds" in done.stderr


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("SIGINT", 130, "interrupted"),
        ("SIGTERM", 143, "received SIGTERM"),
        ("SIGHUP", 129, "received SIGHUP"),
        ("SIGQUIT", 131, "received SIGQUIT"),
    ],
)
def test_a_signal_ends_all(tmp_path, name, status, text):
    number = getattr(signal, name)
    path = script(
        tmp_path,
        "import subprocess",
        "child = subprocess.Popen(['sleep', '60'])",
        "print(os.getpid(), child.pid)",
        "time.sleep(60)",
    )
    with subprocess.Popen(
        [*COMMAND, "run", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    ) as process:
        pids = [pid for _ in range(2) for pid in process.stdout.readline().split()[1:]]
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == status
    assert errors == f"tagi-ddp: {text}; all ranks were ended\n"
    assert len(pids) == 4
    assert all_end(pids)


def test_a_closed_pipe_ends_all_quietly(tmp_path):
    path = script(tmp_path, "for _ in range(6000): print(os.getpid()); time.sleep(0.01)")
    with subprocess.Popen(
        [*COMMAND, "run", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        pid = process.stdout.readline().split()[1]
        process.stdout.close()
        assert process.wait(30) == 128 + signal.SIGPIPE
        assert process.stderr.read() == ""
    assert all_end([pid])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "missing.py"], "there is no script 'missing.py'"),
        (["run", "-n", "0", "x.py"], "must be an integer from 1 up, got '0'"),
        (["run", "-n", "two", "x.py"], "must be an integer from 1 up, got 'two'"),
        (["run", "--timeout", "-1", "x.py"], "must be a number greater than 0, got '-1'"),
        (["run"], "tagi-ddp run: error: the following arguments are required: SCRIPT\n"),
        (["run", "--procs", "4", "x.py"], "there is no option --procs: did you mean --nprocs?"),
        (["run", "-np", "4", "x.py"], "there is no option -np: did you mean -n?"),
        (["run", "--quiet", "x.py"], "no option --quiet: tagi-ddp run --help lists them"),
        (["doctor", "--jason"], "there is no option --jason: did you mean --json?"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_wrong_usage_is_explained(arguments, text):
    done = run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    if arguments[-1] != "missing.py":
        own = "" if arguments == ["walk"] else f" {arguments[0]}"
        assert done.stderr.startswith(f"usage: tagi-ddp{own} [")


@pytest.mark.parametrize(
    ("before", "behind", "noted"),
    [
        ([], ["-n", "4"], "-n 4"),
        ([], ["x", "--max-restarts=3"], "--max-restarts=3"),
        (["-n", "1"], ["-n", "4"], ""),
        ([], ["--help", "-m", "-nothing", "--timeouts", "--", "-n", "4"], ""),
    ],
)
def test_options_behind_the_script_are_the_scripts_and_noted(tmp_path, before, behind, noted):
    path = script(tmp_path, "if rank == 0: print(sys.argv[1:])")
    done = run("run", *before, path, *behind)
    assert (done.returncode, done.stdout) == (0, f"[0] {behind}\n")
    note = f"tagi-ddp: note: {noted} stands behind {path}, so the script gets it. For tagi-ddp run "
    note += f"it stands before: tagi-ddp run {noted} {path}\n"
    assert done.stderr == (note if noted else "")


OPENMPI = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (OPENMPI, "this is task 1 of 2 that openmpi has started"),
        (["RANK"], "OMPI_COMM_WORLD_SIZE is not set"),
    ],
)
def test_one_of_several_tasks_starts_no_job_of_its_own(tmp_path, names, text):
    outer = {f"OMPI_COMM_WORLD_{name}": OPENMPI[name] for name in names}
    done = run("run", script(tmp_path, "print('trains')"), env={**os.environ, **outer})
    assert done.returncode == 2
    assert text in done.stderr
    assert "trains" not in done.stdout


def test_version():
    done = run("--version")
    assert done.stdout.startswith("tagi-ddp 0."), done.stderr
    module = [sys.executable, "-m", "tagi_ddp", "--version"]
    assert subprocess.check_output(module, text=True, timeout=60) == done.stdout


def trained(tmp_path, *kills, restarts=0, launcher="tagi-ddp"):
    """Return the exit status, from where each attempt went on, and the hash of the replicas."""
    path = tmp_path / "train.py"
    path.write_text(RESUMES)
    folder = tmp_path / f"checkpoints {len(kills)}"
    options = {"tagi-ddp": ("run", "-n", "2"), "torchrun": ("--nproc-per-node", "2")}[launcher]
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name(launcher), *options),
            *(f"--max-restarts={restarts}", path, folder, *kills),
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    starts = [int(line.split()[-1]) for line in done.stdout.splitlines() if "from" in line]
    return done, starts, {line.split()[-1] for line in done.stdout.splitlines() if "hash" in line}


def test_restarted_ranks_go_on_from_the_last_checkpoint(tmp_path):
    done, starts, expected = trained(tmp_path)
    assert (done.returncode, starts, len(expected)) == (0, [0], 1), done.stderr
    done, starts, found = trained(tmp_path, "0:5", "3:10", restarts=2)
    assert (done.returncode, starts, found) == (0, [0, 3, 9], expected), done.stderr
    assert (
        done.stderr.count("rank 1 of 2 was killed by SIGKILL; all ranks were ended, and start a")
        == 2
    )


@pytest.mark.slow
def test_no_more_restarts_than_asked_for(tmp_path):
    path = script(tmp_path, "print('here', flush=True)", "sys.exit(3 if rank else 0)")
    done = run("run", "--max-restarts", 2, path)
    assert done.returncode == 3
    assert done.stdout.count("[1] here") == 3
    assert done.stderr.rstrip().endswith("all ranks were ended")
    assert run("run", "--max-restarts", -1, path).returncode == 2


@pytest.mark.slow
def test_torchruns_restarts(tmp_path):
    _, _, expected = trained(tmp_path)
    done, starts, found = trained(tmp_path, "0:5", restarts=1, launcher="torchrun")
    assert (done.returncode, starts, found) == (0, [0, 3], expected), done.stderr[-2000:]


def test_alone_it_prints_help():
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("--help").stdout
    assert "doctor" in done.stdout


def test_the_version_does_not_wait_for_numpy():
    code = "import sys\nfrom tagi_ddp.commands.main import main\n"
    code += "try: main(['--version'])\nfinally: print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"tagi-ddp {tagi_ddp.__version__}\nFalse\n"
