"""torch's IterableDatasets, shared out over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import fresh
from support.rank_pool import RankPool
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tagi_ddp import DDPSequential, prepare
from tagi_ddp.communicators.equality import RanksDiffer


class Stream(IterableDataset[Any]):
    """Numbers, in an order that the epoch gives; workers read every other one."""

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length, self.epoch, self.seed = length, 0, seed

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        rng = np.random.default_rng((self.seed, self.epoch))
        info = get_worker_info()
        own = slice(None) if info is None else slice(info.id, None, info.num_workers)
        for number in rng.permutation(self.length)[own]:
            yield int(number), np.full(2, number, np.float32)


def numbers(batches: Any) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 30), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(0, 2))
def test_shares_make_the_batches_of_one_process(
    length: int, size: int, ranks: int, drop_last: bool, epoch: int
) -> None:
    stream = Stream(length)
    plain = DataLoader(stream, size, drop_last=drop_last)
    loaders = [prepare(plain, num_replicas=ranks, rank=rank) for rank in range(ranks)]
    shares = []
    for loader in loaders:
        loader.set_epoch(epoch)
        shares.append(numbers(loader))
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == numbers(plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_steps_go_on_where_they_were(workers: int) -> None:
    def steps(first: int) -> list[tuple[int, list[int]]]:
        plain = DataLoader(Stream(13), 4, num_workers=workers)
        loader = prepare(plain, num_replicas=2, rank=1)
        return [(step, batch[0].tolist()) for step, batch in loader.steps(2, first)]

    before = torch.get_rng_state()
    assert steps(5) == steps(0)[5:]
    assert len({str(batch) for _, batch in steps(0)}) > 4  # Epochs have orders of their own.
    assert torch.equal(torch.get_rng_state(), before)


def test_a_share_may_be_empty() -> None:
    (batch,) = prepare(DataLoader(Stream(1), 4), num_replicas=2, rank=1)
    assert [part.shape for part in batch] == [(0,), (0, 2)]
    loader = prepare(DataLoader(Stream(1), 4, collate_fn=len), num_replicas=2, rank=1)
    with pytest.raises(TypeError, match="a batch of 1 samples for 2 ranks leaves a rank without"):
        next(iter(loader))
    with pytest.raises(TypeError, match="a stream has no sampler"):
        _ = loader.sampler
    with pytest.raises(TypeError):
        len(loader)


def trained(comm: Any, seed: int, workers: int) -> str | None:
    loader = prepare(
        DataLoader(Stream(40, seed * comm.rank), 8, num_workers=workers),
        num_replicas=comm.size,
        rank=comm.rank,
    )
    with DDPSequential(fresh("mlp"), communicator=comm, average=False) as model:
        try:
            for _, (numbers, rows) in loader.steps(1):
                x = np.tile(rows.numpy(), (1, 6))
                model.learn(x, np.tile(numbers.numpy().astype(np.float32)[:, None], (1, 5)), 0.1)
            return model.check_replicas()
        except RanksDiffer as error:
            return f"refused: {error}"


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_differ_are_refused(shm: RankPool, workers: int) -> None:
    answers = shm.run(trained, 1, workers, size=2, fresh=True)
    assert all("refused" in str(each) and "data of rank 1" in str(each) for each in answers), (
        answers
    )
    alike = shm.run(trained, 0, workers, size=2, fresh=True)
    assert len(set(alike)) == 1
    assert "refused" not in str(alike[0])
