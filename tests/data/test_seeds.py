"""Generators that draw apart on each rank."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytagi
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.rank_pool import RankPool

import tagi_ddp


def draws() -> list[float]:
    network = pytagi.nn.Sequential(pytagi.nn.Linear(1, 1))
    network.preinit_layer()
    weight = next(iter(network.state_dict().values()))[0][0]
    return [random.random(), float(np.random.random()), float(torch.rand(1)), weight]


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 2**40), st.integers(0, 500), st.integers(1, 500))
def test_ranks_draw_apart_and_again_alike(seed: int, rank: int, more: int) -> None:
    number = tagi_ddp.seed_ranks(seed, rank=rank)
    first = draws()
    assert tagi_ddp.seed_ranks(seed, rank=rank + more) != number
    assert all(a != b for a, b in zip(first, draws(), strict=True))
    assert tagi_ddp.seed_ranks(seed, rank=rank) == number
    assert draws() == first


def seeded(comm: Any) -> int:
    return tagi_ddp.seed_ranks(7, rank=comm.rank)


def test_the_rank_is_the_group_s(shm: RankPool) -> None:
    assert len(set(shm.run(seeded, size=3))) == 3
    assert tagi_ddp.seed_ranks(7) == tagi_ddp.seed_ranks(7, rank=0)
