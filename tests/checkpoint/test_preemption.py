"""A signal that announces the end of a job becomes a checkpoint; the next start goes on there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.rank_pool import mpirun, worker_environment

from tagi_ddp.checkpoint.preemption import Preemption
from tagi_ddp.launcher.host import reserve_port

HEAD = """
import os, sys, time
import numpy as np, pytagi
from pytagi.nn import Linear, ReLU, Sequential
from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import Checkpoints

def at(step):
    if step == 10:
        print("pid", os.getpid(), flush=True)
    time.sleep(0.03)

x = np.random.default_rng(0).standard_normal((400, 4), np.float32)
y = x.sum(1, keepdims=True)
pytagi.manual_seed(1)
network = Sequential(Linear(4, 16), ReLU(), Linear(16, 1))
"""
SAMPLER = """
with DDPSequential(network, DDPConfig.from_env(), average=False) as model:
    sampler = DistributedSampler(x, seed=1)
    with Checkpoints("saved", model, sampler=sampler, on_signal=lambda: {"kept": 7}) as checkpoints:
        first = checkpoints.resume()
        assert checkpoints.extra == (None if first == 0 else {"kept": 7})
        for step, share in sampler.steps(100, epochs=15, first=first):
            at(step)
            model.learn(x[share], y[share], 0.01)
    print("done", model.check_replicas(), flush=True)
"""
BY_HAND = """
with DDPSequential(network, DDPConfig.from_env(), average=False) as model:
    with Checkpoints("saved", model) as checkpoints:
        rank, size = model.communicator.rank, model.communicator.size
        for step in range(checkpoints.resume(), 60):
            at(step)
            rows = np.arange(step % 4 * 100, step % 4 * 100 + 100)[rank::size]
            model.learn(x[rows], y[rows], 0.01)
            checkpoints.after_step(step + 1)
    print("done", model.check_replicas(), flush=True)
"""
MERGES = SAMPLER.replace("average=False", "reduction='precision', sync_every=4")
ELASTIC = """
with DDPSequential(network, DDPConfig.from_env(), average=False, elastic=True) as model:
    sampler = DistributedSampler(x, seed=1)
    with Checkpoints("saved", model, sampler=sampler) as checkpoints:
        for step, share in model.steps(sampler, 100, 15, first=checkpoints.resume()):
            at(step)
            model.learn(x[share], y[share], 0.01)
    print("done", model.check_replicas(), flush=True)
"""
TRAINER = """
from tagi_ddp.parallel import GaussianLoss, ParallelMixin, Task
class Fit(Task):
    def run_model(self, model, batch, state):
        at(state.num_steps)
        return model(batch[0])
    def compute_loss(self, model, batch, state, output):
        return GaussianLoss(model, output, batch[1], 0.1)
with ParallelMixin({"name": "fit", "exp_dir": "."}) as trainer:
    if os.path.isdir("checkpoints/latest"):
        trainer.load_checkpoint(Fit(), network)
    trainer.train(Fit(), network, (x, y), epochs=15, batch_size=100)
    print("done", trainer.task_model.model.check_replicas(), flush=True)
"""


class Job:
    """A job of two ranks that has made ten steps, or a part of one with ``ranks`` ranks."""

    def __init__(
        self, folder: Path, script: str, *options: str, wait: bool = True, ranks: int = 2
    ) -> None:
        (folder / "job.py").write_text(HEAD + script)
        command = [sys.executable, "-m", "tagi_ddp", "run", "-n", str(ranks), *options, "job.py"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        )
        assert self.process.stdout is not None
        self.pids: dict[int, int] = {}
        self._text = ""
        while wait and len(self.pids) < ranks:
            line = self.process.stdout.readline()
            assert line, self._text
            self._text += line
            if found := re.match(r"\[(\d)\] pid (\d+)", line):
                self.pids[int(found[1])] = int(found[2])

    def end(self) -> tuple[int, str]:
        """Return the exit status and the output."""
        try:
            self._text += self.process.communicate(timeout=90)[0]
        finally:
            self.process.kill()
        return self.process.returncode, self._text


def hashes(text: str) -> list[str]:
    return re.findall(r"done (\w+)", text)


def saved(folder: Path) -> list[int]:
    return [int(path.name.split("-")[-1]) for path in folder.glob("*/[0-9]*-step-*")]


CASES = [
    (SAMPLER, "launcher", signal.SIGTERM),
    (SAMPLER, "rank", signal.SIGUSR1),
    (BY_HAND, "rank", signal.SIGTERM),
    (MERGES, "launcher", signal.SIGUSR1),
    (ELASTIC, "launcher", signal.SIGTERM),
    (TRAINER, "launcher", signal.SIGTERM),
]
NAMES = {SAMPLER: "sampler", BY_HAND: "by hand", MERGES: "merges", ELASTIC: "elastic"}
NAMES[TRAINER] = "trainer"
RANK = "rank", signal.SIGUSR1


@pytest.mark.parametrize(
    ("script", "target", "number"),
    [
        pytest.param(
            *case,
            id=f"{NAMES[case[0]]}-{case[1]}-{case[2].name}",
            marks=[] if case[0] == SAMPLER and case[1:] != RANK else [pytest.mark.slow],
        )
        for case in CASES
    ],
)
def test_one_checkpoint_and_the_same_end(
    tmp_path: Path, script: str, target: str, number: int
) -> None:
    whole, warned = tmp_path / "whole", tmp_path / "warned"
    whole.mkdir()
    warned.mkdir()
    reference = Job(whole, script, wait=False)
    job = Job(warned, script)
    os.kill(job.process.pid if target == "launcher" else job.pids[1], number)
    status, text = job.end()
    assert status == 75, text
    steps = saved(warned)
    assert len(steps) == 1, text
    assert 10 < steps[0] < 60
    _, before = reference.end()
    status, after = Job(warned, script, wait=False).end()
    assert status == 0, after
    assert len(hashes(after)) == 2
    assert hashes(after) == hashes(before), before + after


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_of_two_launchers(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAGI_DDP_SECRET", "ours")
    with closing(reserve_port(one_host=False)) as holder:
        where = ["--rendezvous", f"localhost:{holder.getsockname()[1]}", "--nnodes", "2"]

        def start(wait: bool) -> list[Job]:
            nodes = [
                Job(tmp_path, SAMPLER, *where, "--node-rank", str(node), wait=False, ranks=1)
                for node in range(2)
            ]
            if wait:
                while not list(tmp_path.glob("begun*")):
                    time.sleep(0.05)
            return nodes

        head = HEAD.replace('print("pid"', 'open("begun", "w"); print("pid"')
        monkeypatch.setitem(globals(), "HEAD", head)
        nodes = start(wait=True)
        nodes[1].process.send_signal(number)
        ends = [node.end() for node in nodes]
        assert [status for status, _ in ends] == [75, 75], ends
        assert len(saved(tmp_path)) == 1
        ends = [node.end() for node in start(wait=False)]
    assert [status for status, _ in ends] == [0, 0], ends


@pytest.mark.slow
def test_the_launcher_starts_the_ranks_again_and_counts_no_failure(tmp_path: Path) -> None:
    """With one restart left, a real failure after that still has it."""
    fails = SAMPLER.replace(
        "at(step)",
        """at(step)
            if step == 50 and not os.path.exists("failed"):
                open("failed", "w").close()
                raise ValueError("once")""",
    )
    job = Job(tmp_path, fails.replace('{"kept": 7}', "None"), "--max-restarts", "1")
    os.kill(job.pids[0], signal.SIGTERM)
    status, text = job.end()
    assert status == 0, text
    assert len(hashes(text)) == 2
    assert text.count("start again") == 2


def test_one_warned_rank_of_an_elastic_job_leaves(tmp_path: Path) -> None:
    job = Job(tmp_path, ELASTIC)
    os.kill(job.pids[1], signal.SIGTERM)
    status, text = job.end()
    assert status == 0, text
    assert len(hashes(text)) == 1
    assert "rank 1 ended with exit status 75; the others go on" in text


@pytest.fixture
def usual_effects() -> Iterator[None]:
    """SIGUSR1 and SIGUSR2 end a process, although the one that started the tests ignores them."""
    numbers = signal.SIGUSR1, signal.SIGUSR2
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_effects")
def test_a_handler_of_the_script_stays() -> None:
    received: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
    preemption = Preemption((signal.SIGUSR1, signal.SIGUSR2))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert received == [signal.SIGUSR1]
    assert preemption.received is None
    os.kill(os.getpid(), signal.SIGUSR2)
    assert preemption.received == signal.SIGUSR2
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL  # the next one ends the process
    preemption.received = None  # else it would end this process now
    preemption.close()


@pytest.mark.usefixtures("usual_effects")
def test_a_fork_ends_at_the_first_signal() -> None:
    """Workers of a loader are ended by SIGTERM."""
    preemption = Preemption((signal.SIGUSR2,))
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(30)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGUSR2
        assert preemption.received is None
    finally:
        preemption.close()


OUTSIDE = {
    "before the first step": """
x = np.zeros((8, 1), np.float32)
with Checkpoints("saved", model, sampler=DistributedSampler(x)) as checkpoints:
    os.kill(os.getpid(), signal.SIGTERM)
""",
    "no steps that ask": """
with Checkpoints("saved", model) as checkpoints:
    checkpoints.save(1)
    os.kill(os.getpid(), signal.SIGTERM)
""",
    "after the last step": """
with Checkpoints("saved", model) as checkpoints:
    checkpoints.after_step(1)
    checkpoints.save(1)
    os.kill(os.getpid(), signal.SIGTERM)
    print("goes on to the end of the block", flush=True)
""",
}


@pytest.mark.parametrize("when", OUTSIDE)
def test_a_signal_that_no_step_follows_ends_the_process(tmp_path: Path, when: str) -> None:
    head = "import os, signal\nimport numpy as np\nfrom pytagi.nn import Linear, Sequential\n"
    head += "from tagi_ddp import DistributedSampler, accelerate\n"
    head += "from tagi_ddp.checkpoint import Checkpoints\n"
    head += "model = accelerate(Sequential(Linear(1, 1)))\n"
    code = head + OUTSIDE[when] + "print('lives')\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "lives" not in done.stdout
    if when == "after the last step":
        assert "goes on" in done.stdout
        assert saved(tmp_path) == [1]


def test_ranks_ask_each_other_about_five_times_a_second() -> None:
    preemption = Preemption(())
    asked: list[Any] = []

    def gather(own: Any) -> list[Any]:
        asked.append(own)
        return [own, [0, own[1] * 3]]  # another rank is slower

    for _ in range(2000):
        if preemption.is_due("group"):
            assert preemption.ask(gather) == []
        time.sleep(0.0002)
    assert 2 <= len(asked) <= 40
    assert preemption.is_due("another group")  # whose ranks count anew
    preemption.received = signal.SIGTERM
    assert preemption.ask(gather) == [signal.SIGTERM, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "expected"),
    [("mpirun", signal.SIGUSR1, 75), ("torchrun", signal.SIGTERM, 1)],
)
def test_under_other_launchers(tmp_path: Path, name: str, number: int, expected: int) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = mpirun(2) if name == "mpirun" else [sys.executable, *torchrun]
    head = HEAD.replace('print("pid"', 'open("begun", "w"); print("pid"')
    (tmp_path / "job.py").write_text(head + SAMPLER)
    script = ["job.py"] if name == "torchrun" else [sys.executable, "job.py"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": worker_environment({}), "text": True}
    with subprocess.Popen([*command, *script], stdout=subprocess.DEVNULL, **options) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(60) == expected
    assert len(saved(tmp_path)) == 1
    done = subprocess.run([*command, *script], capture_output=True, timeout=60, **options)
    assert done.returncode == 0, done.stderr
    assert len(set(hashes(done.stdout))) == 1
