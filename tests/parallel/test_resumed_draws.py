"""A trainer that resumes draws the random numbers of one that was not stopped."""

from __future__ import annotations

import random
import secrets
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_pool import RankPool
from torch import nn
from torch.utils.data import Dataset

from parallel.support import launched, torch_group
from parallel.test_mixin import Fit, tagi_net
from parallel.test_mixin import settings as settings_of
from parallel.test_resumed_epochs import noisy_net
from tagi_ddp.checkpoint import read_tree
from tagi_ddp.checkpoint.folder import Folder
from tagi_ddp.parallel import BaseTrainer, Callback, CheckpointConfig, ParallelMixin

KINDS = ("torch", "numpy", "python", "")
SAMPLES, BATCH, EPOCHS = 14, 8, 3  # two samples at least for each of three ranks
STEPS = EPOCHS * -(-SAMPLES // BATCH)


def noise(kind: str, *shape: int) -> Any:
    """Return numbers from a global generator, zeros if there is no kind; float32."""
    count = int(np.prod(shape))
    numbers = {
        "torch": lambda: torch.randn(count).numpy(),
        "numpy": lambda: np.random.standard_normal(count),
        "python": lambda: np.array([random.gauss(0, 1) for _ in range(count)]),
        "": lambda: np.zeros(count),
    }[kind]()
    return numbers.reshape(shape).astype(np.float32) / 8


@dataclass(frozen=True)
class Case:
    """The kinds of generators from which the parts of a run draw."""

    model: str  # "module" or "tagi"
    mixin: bool
    samples: str
    held_out: str
    task: str
    optimizer: str
    callback: str


class Rows(Dataset[Any]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x = noise(self.kind, 3) + np.float32(index / SAMPLES)
        return x, x[:2] ** 2


class Noisy(Fit):
    """A task that adds noise to its inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        x = np.asarray(batch[0]) + noise(self.kind, *batch[0].shape)
        return model(torch.as_tensor(x) if isinstance(model, nn.Module) else x)


class Langevin(torch.optim.SGD):
    """A descent whose noise does not shrink with its rate, which torch sets to 0 when it loads."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, 0.05, momentum=0.5)
        self.kind = kind

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter += torch.as_tensor(noise(self.kind, *parameter.shape))
        return super().step(closure)


class Draws(Callback):
    """Draws wherever it is called."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_before_step(self, trainer: Any, samples: int, last: bool) -> None:
        noise(self.kind, 1)

    def on_epoch_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        metrics["drawn"] = float(noise(self.kind, 1)[0])

    def on_metrics(self, trainer: Any, metrics: dict[str, float]) -> None:
        noise(self.kind, 1)


def run(case: Case, folder: Path, path: Path | None = None) -> Any:
    """Train, from a checkpoint on if there is a path; return all that is to be the same.

    These are losses, rows of the log, parameters, and what is drawn next.
    """
    is_module = case.model == "module"
    net, task = noisy_net() if is_module else tagi_net(), Noisy(case.task)
    make = ParallelMixin if case.mixin else BaseTrainer
    config = settings_of(str(folder), checkpoint=CheckpointConfig(1))
    with make(config) as trainer:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(trainer.rank)
        if path is not None:
            trainer.load_checkpoint(task, net, path)
        losses = trainer.train(
            task,
            net,
            Rows(case.samples),
            epochs=EPOCHS,
            batch_size=BATCH,
            optimizer=(lambda own: Langevin(own, case.optimizer)) if is_module else None,
            held_out=Rows(case.held_out),
            callbacks=[Draws(case.callback)],
        )
        rank = trainer.rank
    tree = read_tree(Folder(folder / "checkpoints").whole()[-1].file_of(0), "parts", "trainer")
    parameters = {**tree["model"], **tree["parameters"]}
    bits = {name: np.asarray(value).tobytes() for name, value in parameters.items()}
    log = (folder / "logs" / "run.jsonl").read_text().splitlines() if rank == 0 else []
    return losses, log, bits, [noise(kind, 1).tolist() for kind in KINDS]


def from_steps(comm: Any, case: Case, job: str, folder: Path, steps: list[int]) -> list[str]:
    """Resume from the checkpoints of these steps; return what differs from the whole run."""
    grouped = comm.size > 1 and case.model == "module"
    group = torch_group(comm, f"{folder}.group") if grouped else nullcontext()
    wrong = []
    with launched(comm.rank, comm.size, job), group:
        losses, log, *rest = run(case, folder / "whole")
        found = Folder(folder / "whole" / "checkpoints").whole()
        for each in found:
            if each.step in steps:
                resumed = run(case, folder / str(each.step), each.path)
                done = EPOCHS - len(resumed[0])
                expected = losses[done:], log[done:], *rest
                names = "losses", "log", "parameters", "random numbers"
                for name, one, other in zip(names, resumed, expected, strict=True):
                    if one != other:
                        wrong.append(f"{name} after {each.step} steps")
    return wrong


kinds = st.sampled_from(KINDS)
CASES = st.builds(
    Case, st.sampled_from(["module", "tagi"]), st.booleans(), kinds, kinds, kinds, kinds, kinds
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@settings(deadline=None, max_examples=6)
@given(case=CASES, step=st.integers(1, STEPS - 1))
def test_one_process(shm: RankPool, folder: Path, case: Case, step: int) -> None:
    job = secrets.token_hex(4)
    assert shm.run(from_steps, case, job, folder / job, [step], size=1) == [[]]


@pytest.mark.slow
@settings(deadline=None, max_examples=30)
@given(case=CASES, size=st.integers(1, 3))
def test_every_step(shm: RankPool, folder: Path, case: Case, size: int) -> None:
    job, steps = secrets.token_hex(4), list(range(1, STEPS))
    if size > 1:  # each rank draws numbers of its own, and parameters stay the same on all
        case = replace(case, mixin=True, optimizer="")
    assert shm.run(from_steps, case, job, folder / job, steps, size=size) == [[]] * size
