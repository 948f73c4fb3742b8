"""Means in few bits: all ranks get the same, and nothing is dropped for good."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.rank_pool import RankPool

from tagi_ddp.communicators.buffers import equal_counts
from tagi_ddp.optim.daso.compressed_mean import CompressedMean, no_residual

Parts = tuple[np.ndarray, ...]


def compress_means(
    comm: Any, size: int, dtype: torch.dtype, limit: int, times: int, fall: float
) -> list[Parts]:
    """Return each vector, mean and residual, elementwise: own, and of the mean.

    Each vector is ``fall`` times as small as the one before.
    """
    generator = torch.Generator().manual_seed(comm.rank)
    scale = 10.0 ** torch.arange(size, dtype=torch.float64).remainder(5)
    vector = torch.zeros(size, dtype=scale.dtype)
    residual = no_residual(vector, comm, limit)
    found = []
    for _ in range(times):
        vector = scale * torch.randn(size, generator=generator, dtype=scale.dtype)
        scale /= fall
        before = vector.clone()
        mean = CompressedMean(vector, residual, comm, dtype, limit)
        while mean._unread:
            mean.progress()
        mean.finish()
        mean.finish()
        assert torch.equal(vector, before)
        assert mean.mean.dtype == dtype
        residual = mean.residual
        share, place, begin = torch.zeros_like(vector), 0, 0
        for part in vector.split(limit):
            counts = equal_counts(len(part), comm.size)
            first = begin + sum(counts[: comm.rank])
            own = counts[comm.rank]
            share[first : first + own] = residual.share[place : place + own]
            place, begin = place + own, begin + len(part)
        assert place == len(residual.share)
        found.append(
            (vector.numpy(), mean.mean.float().numpy(), residual.own.numpy(), share.numpy())
        )
    return found


@pytest.mark.parametrize("fall", [1.0, 10.0])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("size", "limit"), [(50, 1000), (50, 7), (2, 1)])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.half, 11)])
def test_the_residual_is_sent_the_next_time(
    shm: RankPool, ranks: int, size: int, limit: int, dtype: torch.dtype, bits: int, fall: float
) -> None:
    """Its units are those of the vectors, whatever the size of the next one."""
    times = 5
    found = shm.run(compress_means, size, dtype, limit, times, fall, size=ranks)
    sums = {"vectors": np.zeros(size), "means": np.zeros(size)}
    for time in range(times):
        vectors, averages, own, share = (
            np.array([found[rank][time][part] for rank in range(ranks)], np.float64)
            for part in range(4)
        )
        assert (averages == averages[0]).all()
        sums["vectors"] += vectors.mean(0)
        sums["means"] += averages[0]
        kept = sums["vectors"] - sums["means"]
        scale = np.abs(vectors).max(0)
        np.testing.assert_allclose(kept / scale, (own.mean(0) + share.sum(0)) / scale, atol=1e-5)
        assert (np.abs(kept) <= 4 * 2.0**-bits * (scale + np.abs(averages[0]))).all()
        assert np.abs(own).max() > 0


def mean_without_residual(comm: Any, limit: int) -> np.ndarray:
    vector = torch.randn(
        11, dtype=torch.float64, generator=torch.Generator().manual_seed(comm.rank)
    )
    mean = CompressedMean(vector, None, comm, torch.float64, limit)
    mean.finish()
    assert mean.residual is None
    return mean.mean.numpy()


def test_without_a_cast(shm: RankPool) -> None:
    results = [
        row for limit in (1, 4, 100) for row in shm.run(mean_without_residual, limit, size=3)
    ]
    for row in results:
        np.testing.assert_array_equal(row, results[0])
    own = [
        torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
        for r in range(3)
    ]
    np.testing.assert_allclose(results[0], torch.stack(own).mean(0).numpy(), atol=1e-15)
