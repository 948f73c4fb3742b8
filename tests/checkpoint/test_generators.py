"""Checkpoints restore the generators of random numbers: global ones, and those of the script."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import fresh
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential, accelerate
from tagi_ddp.checkpoint import Checkpoints, generators

GENERATORS: dict[str, Callable[[], Any]] = {
    "numpy": lambda: np.random.default_rng(1),
    "mersenne": lambda: np.random.Generator(np.random.MT19937(1)),
    "old numpy": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}


def draw(generators: dict[str, Any]) -> list[float]:
    return [
        generators["numpy"].random(),
        generators["mersenne"].standard_normal(),
        generators["old numpy"].normal(),
        generators["python"].gauss(),
        float(torch.randn(1, generator=generators["torch"])),
        random.random(),
        float(np.random.rand()),
        float(torch.rand(1)),
    ]


def test_generators(tmp_path: Path) -> None:
    model = accelerate(fresh("mlp"))
    found = []
    for first in (True, False):
        generators = {name: make() for name, make in GENERATORS.items()}
        with Checkpoints(tmp_path, model, generators=generators) as checkpoints:
            if first:
                draw(generators)
                checkpoints.save(1)
            else:
                assert checkpoints.resume() == 1
            found.append(draw(generators))
    assert found[0] == found[1]


def noisy(comm: Any, folder: str) -> list[str]:
    model = DDPSequential(fresh("mlp"), communicator=comm)
    rng = np.random.default_rng(comm.rank)
    with Checkpoints(folder, model, generators={"noise": rng}) as checkpoints:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if checkpoints.resume() == 0:
                checkpoints.save(1)
        assert rng.random() == np.random.default_rng(comm.rank).random()
        return [str(warning.message) for warning in caught]


def test_generators_of_other_ranks(shm: RankPool, tmp_path: Path) -> None:
    assert shm.run(noisy, str(tmp_path), size=2) == [[], []]
    for told in shm.run(noisy, str(tmp_path), size=3):
        assert len(told) == 1
        assert "the generator 'noise' differed between the ranks" in told[0]


class Generator:
    """A global generator of a stand-in for torch, or for its GPU."""

    def __init__(self, state: int, here: bool) -> None:
        self.state, self.here, self.cuda = state, here, self

    def is_initialized(self) -> bool:
        return self.here

    def is_available(self) -> bool:
        return True

    def get_rng_state(self) -> Any:
        return np.array([self.state])

    def set_rng_state(self, state: Any) -> None:
        self.state = int(state[0])


def with_stand_ins(comm: Any, folder: str, told: list[tuple[int, int, bool, bool]]) -> Any:
    """Save or resume with torch, and CUDA, in use on some ranks; return what is drawn from then."""
    own, shared, has_torch, has_cuda = told[comm.rank]
    torch_now = Generator(own, True)
    torch_now.cuda = Generator(own + shared, has_cuda)
    modules = SimpleNamespace(modules={"torch": torch_now} if has_torch else {})
    model, given = DDPSequential(fresh("mlp"), communicator=comm), np.random.default_rng(own)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(generators, "sys", modules)
        random.seed(shared)
        np.random.seed(own)
        with Checkpoints(folder, model, generators={"given": given}) as checkpoints:
            resumed = checkpoints.resume()
            if not resumed:
                checkpoints.save(1)
        drawn = [random.random(), np.random.rand(), given.random()]
        return drawn, has_torch and torch_now.state, has_cuda and torch_now.cuda.state


@pytest.mark.parametrize("seed", range(6))
def test_generators_that_only_some_ranks_have(shm: RankPool, tmp_path: Path, seed: int) -> None:
    """A rank finds what was its own; other numbers of ranks what was the same on all."""
    draw = random.Random(seed)
    before, after = (2, 2) if seed == 0 else (draw.randint(1, 4), draw.randint(1, 4))

    def ranks(size: int, same: bool, shared: int) -> list[tuple[int, int, bool, bool]]:
        found = []
        for rank in range(size):
            has_torch = draw.random() < 0.7
            has_cuda = has_torch and draw.random() < 0.7
            found.append((1 if same else rank + 10 * shared, shared, has_torch, has_cuda))
        return found

    saved = ranks(before, draw.random() < 0.5, 3)
    resuming = [(own, 4, True, True) for own, *_ in ranks(after, False, 7)]
    folder = str(tmp_path)
    expected = shm.run(with_stand_ins, folder, saved, size=before)
    alone = shm.run(with_stand_ins, f"{folder}/alone", resuming, size=after)
    found = shm.run(with_stand_ins, folder, resuming, size=after)
    for rank, (drawn, of_torch, of_cuda) in enumerate(found):
        theirs = [expected[rank]] if before == after else expected
        for place, now in enumerate(drawn):
            before_it = {each[0][place] for each in theirs}
            assert now == (before_it.pop() if len(before_it) == 1 else alone[rank][0][place])
        for place, now in ((1, of_torch), (2, of_cuda)):
            states = {each[place] for each in theirs}
            restored = len(states) == 1 and False not in states
            assert now == (states.pop() if restored else alone[rank][place])
