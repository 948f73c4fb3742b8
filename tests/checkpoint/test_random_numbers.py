"""A resumed run draws the random numbers of the run that was not stopped."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

from tagi_ddp import prepare
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.communicators.single import SingleCommunicator

EPOCHS, PER_EPOCH = 2, 3
KINDS = ("torch", "numpy", "python", "own")


@dataclass(frozen=True)
class Case:
    """The generators from which the loop, samples and batches draw; how data are loaded."""

    loop: frozenset[str]
    samples: frozenset[str]
    batches: frozenset[str]
    workers: int
    persistent: bool
    prefetch: int
    given_own: bool  # DataLoader(generator=own)
    whole_batches: bool  # __getitems__
    by_epochs: bool  # plain iteration
    method: str = "fork"


def draw(kinds: frozenset[str], own: Any) -> list[float]:
    drawn = {
        "torch": lambda: float(torch.rand(())),
        "numpy": np.random.random,
        "python": random.random,
        "own": lambda: float(torch.rand((), generator=own)),
    }
    return [drawn[kind]() for kind in KINDS if kind in kinds]


class Rows(Dataset[Any]):
    """Samples of noise, alone or in whole batches; begun by each worker."""

    def __init__(self, case: Case, own: torch.Generator) -> None:
        self.case, self.begun = case, 0
        self.own = own if case.method == "fork" else None  # torch cannot send it elsewhere
        if case.whole_batches:
            self.__getitems__ = self.several

    def __len__(self) -> int:
        return 5 * PER_EPOCH - 1

    def __getitem__(self, index: int) -> list[float]:
        info = get_worker_info()
        assert info is None or (info.dataset is self and self.begun == 1)
        return [float(index), *draw(self.case.samples, self.own)]

    def begin(self, worker: int) -> None:
        torch.manual_seed(worker)  # batches are drawn from other seeds
        self.begun += 1

    def several(self, indices: list[int]) -> list[list[float]]:
        assert type(indices) is list
        return [self[index] for index in indices]

    def collate(self, samples: list[Any]) -> Any:
        return [samples, draw(self.case.batches, self.own)]


def run(case: Case, folder: Path, stop: int | None, rank: int = 0) -> dict[int, Any]:
    """Train from the last checkpoint up to this step; return what was drawn in each step."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    own = torch.Generator().manual_seed(4)
    rows = Rows(case, own)
    workers: Any = {}
    if case.workers:
        workers = {
            "num_workers": case.workers,
            "persistent_workers": case.persistent,
            "prefetch_factor": case.prefetch,
            "multiprocessing_context": case.method,
            "worker_init_fn": rows.begin,
        }
    plain = DataLoader(
        rows,
        5,
        shuffle=True,
        collate_fn=rows.collate,
        generator=own if case.given_own else None,
        **workers,
    )
    loader = prepare(plain, num_replicas=2, rank=rank, seed=6)
    drawn: dict[int, Any] = {}
    part = {"net": torch.nn.Linear(1, 1)}
    with Checkpoints(
        folder,
        part,
        communicator=SingleCommunicator(),
        sampler=loader.sampler,
        generators={"own": own},
    ) as checkpoints:
        first = checkpoints.resume()

        def steps() -> Any:
            if not case.by_epochs:
                yield from loader.steps(EPOCHS, first)
                return
            for epoch in range(first // PER_EPOCH, EPOCHS):
                loader.set_epoch(epoch)
                yield from enumerate(loader, epoch * PER_EPOCH)

        for step, batch in steps():
            drawn[step] = [batch, draw(case.loop, own)]
            checkpoints.save(step + 1)
            if step + 1 == stop:
                break
        after = draw(frozenset(KINDS), own)
    return {**drawn, EPOCHS * PER_EPOCH: after}


def assert_resumes(case: Case, stop: int) -> None:
    with TemporaryDirectory() as folder:
        whole = run(case, Path(folder) / "whole", None)
        run(case, Path(folder) / "parts", stop)
        resumed = run(case, Path(folder) / "parts", None)
    assert len(resumed) == len(whole) - stop
    assert resumed == {step: whole[step] for step in resumed}


@st.composite
def cases(draws: Any, workers: int, methods: tuple[str, ...] = ("fork",)) -> tuple[Case, int]:
    kinds = st.frozensets(st.sampled_from(KINDS))
    given_own, method = draws(st.booleans()), draws(st.sampled_from(methods))
    seeded = (given_own and method == "fork") or not workers
    in_workers = kinds if seeded else kinds.map(lambda some: some - {"own"})
    by_epochs = draws(st.booleans())
    case = Case(
        loop=draws(kinds),
        samples=draws(in_workers),
        batches=draws(in_workers),
        workers=workers,
        persistent=draws(st.booleans()),
        prefetch=draws(st.integers(1, 3)),
        given_own=given_own,
        whole_batches=draws(st.booleans()),
        by_epochs=by_epochs,
        method=method,
    )
    every = PER_EPOCH if by_epochs else 1
    return case, every * draws(st.integers(1, EPOCHS * PER_EPOCH // every - 1))


@settings(deadline=None, max_examples=8)
@given(cases(workers=0))
def test_without_workers(told: tuple[Case, int]) -> None:
    assert_resumes(*told)


@settings(deadline=None, max_examples=4)
@given(cases(workers=2))
def test_with_workers(told: tuple[Case, int]) -> None:
    assert_resumes(*told)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.sampled_from([1, 2]).flatmap(cases))
def test_many_with_workers(told: tuple[Case, int]) -> None:
    assert_resumes(*told)


@pytest.mark.slow
@settings(deadline=None, max_examples=3)
@given(cases(workers=2, methods=("spawn", "forkserver")))
def test_workers_that_are_no_forks(told: tuple[Case, int]) -> None:
    assert_resumes(*told)


def test_no_two_batches_draw_the_same_in_workers(tmp_path: Path) -> None:
    """Other steps, ranks, samples and generators have other numbers, however many workers."""
    every = frozenset(KINDS)
    found: list[float] = []
    for rank in range(2):
        runs = []
        for workers in (1, 2):
            case = Case(frozenset(), every, every, workers, False, 2, True, False, False)
            folder = tmp_path / f"{rank}-{workers}"
            runs.append(run(case, folder, None, rank))
        assert runs[0] == runs[1]
        for step in range(EPOCHS * PER_EPOCH):
            (samples, of_batch), _ = runs[0][step]
            found += [*of_batch, *(value for sample in samples for value in sample[1:])]
    assert len(set(found)) == len(found) == 4 * EPOCHS * (14 + 2 * PER_EPOCH)
