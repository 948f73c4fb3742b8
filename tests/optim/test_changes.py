"""A record of changed tensors, and the ranks' vote on it."""

from __future__ import annotations

from typing import Any

import torch
from support.rank_pool import RankPool

from tagi_ddp.optim.changes import Changes, Vote


def test_changes() -> None:
    tensors = [torch.zeros(2), torch.full((3,), torch.inf)]
    changes = Changes(lambda: tensors)
    assert [bool(flag) for flag in changes.flags()] == [False, False]
    tensors[0][1] = 1.0
    assert [bool(flag) for flag in changes.flags()] == [True, False]
    changes.note([False, True])
    assert [bool(flag) for flag in changes.flags()] == [True, False]
    changes.note([True, False])
    tensors[1] = torch.zeros(4)  # another in its place, and one more
    tensors.append(torch.zeros(1))
    assert [bool(flag) for flag in changes.flags()] == [False, True, True]
    changes.note([False, True, True])
    del tensors[0]
    assert [bool(flag) for flag in changes.flags()] == [True, True]


def votes(comm: Any) -> list[int]:
    flags = [torch.tensor(comm.rank == 1), torch.tensor(False)]
    return Vote([comm.rank, 0], flags, comm).result()


def test_votes(shm: RankPool) -> None:
    assert shm.run(votes, size=3) == [[2, 0, 1, 0]] * 3
    assert shm.run(votes, size=1) == [[0, 0, 0, 0]]
