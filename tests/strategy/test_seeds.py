"""Seeds: where they come from, whom they reach, and that groups do not share them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tagi_ddp.strategy import base_seed, group_seed, seed_everything

SET = {"TAGI_DDP_BASE_SEED": "3", "ANEMOI_BASE_SEED": "-4", "SLURM_JOB_ID": "5"}


@pytest.mark.parametrize(
    ("base", "environ", "expected"),
    [
        (7, SET, 7),
        (np.int64(7), SET, 7),
        (0, SET, 0),
        (None, SET, 3),
        (None, {**SET, "TAGI_DDP_BASE_SEED": ""}, -4),
        (None, {"SLURM_JOB_ID": "5"}, 5),
    ],
)
def test_where_the_base_comes_from(base: int, environ: dict[str, str], expected: int) -> None:
    assert base_seed(base, environ) == expected


def test_default_warns() -> None:
    with pytest.warns(RuntimeWarning, match="TAGI_DDP_BASE_SEED"):
        assert base_seed(None, {}) == 42


def test_no_integer() -> None:
    with pytest.raises(ValueError, match="ANEMOI_BASE_SEED must be an integer, got 'x1'"):
        base_seed(None, {"ANEMOI_BASE_SEED": "x1"})
    with pytest.raises(TypeError, match="base"):
        base_seed(1.5, {})  # type: ignore[arg-type]


@given(st.integers(-(10**40), 10**40), st.integers(-(10**40), 10**40))
def test_seeds_differ(base: int, other: int) -> None:
    seeds = [group_seed(base, group) for group in range(50)]
    assert len(set(seeds)) == 50
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds == [group_seed(base, group) for group in range(50)]
    if base != other:
        assert seeds != [group_seed(other, group) for group in range(50)]


@contextmanager
def generators_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws() -> list[object]:
    from pytagi.nn import Linear, Sequential

    model = Sequential(Linear(3, 2))
    weights = model.state_dict()
    return [random.random(), np.random.rand(), torch.rand(1).item(), repr(weights)]


def test_everything_is_seeded() -> None:
    with generators_kept():
        results = []
        for seed in (1, 2**32 - 1, 1):
            seed_everything(seed)
            results.append(draws())
    assert results[0] == results[2]
    assert all(one != other for one, other in zip(results[0], results[1], strict=True))
