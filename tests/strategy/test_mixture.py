"""The mixture of Gaussians that members predict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.rank_pool import RankPool

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.strategy import mixture

SHAPES = arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
GAUSSIANS = st.tuples(st.integers(1, 4), SHAPES).flatmap(
    lambda of: st.tuples(
        arrays.arrays(np.float32, (of[0], *of[1]), elements=st.floats(-1e3, 1e3, width=32)),
        arrays.arrays(np.float32, (of[0], *of[1]), elements=st.floats(0, 1e6, width=32)),
    )
)


def mix(comm: Any, means: Any, variances: Any) -> Any:
    return mixture(comm, means[comm.rank], variances[comm.rank])


@given(GAUSSIANS)
@settings(max_examples=50, deadline=None)
def test_against_the_moments(shm: RankPool, gaussians: tuple[np.ndarray, np.ndarray]) -> None:
    means, variances = gaussians
    answers = shm.run(mix, means, variances, size=len(means))
    wide, squares = means.astype(np.float64), variances + means.astype(np.float64) ** 2
    mean = wide.mean(axis=0)
    for mixed_mean, mixed_variance in answers:
        assert mixed_mean.shape == mixed_variance.shape == means.shape[1:]
        assert mixed_mean.dtype == mixed_variance.dtype == np.float32
        assert mixed_mean.tobytes() == answers[0][0].tobytes()
        assert mixed_variance.tobytes() == answers[0][1].tobytes()
        np.testing.assert_allclose(mixed_mean, mean, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            mixed_variance, squares.mean(axis=0) - mean**2, rtol=1e-5, atol=1e-5
        )


def test_one_far_from_zero(shm: RankPool) -> None:
    """The difference of squares would lose all of these variances in float32."""
    means, variances = np.float32([[4096], [4097]]), np.float32([[1e-3], [3e-3]])
    for mean, variance in shm.run(mix, means, variances, size=2):
        assert mean == pytest.approx(4096.5)
        assert variance == pytest.approx(0.25 + 2e-3)


def test_tensors() -> None:
    mean, variance = mixture(SingleCommunicator(), torch.ones(2, 3), torch.full((2, 3), 4.0))
    np.testing.assert_array_equal(mean, np.ones((2, 3)))
    np.testing.assert_array_equal(variance, np.full((2, 3), 4))


REFUSED = {
    "var has shape (3,), mu (2,)": (ValueError, ([0.0, 0.0], [1.0, 1.0, 1.0])),
    "var has negative elements, the least is -2.0": (ValueError, ([0.0, 0.0], [1.0, -2.0])),
    "mu must be an array of numbers": (TypeError, (["a", "b"], [1.0, 1.0])),
}


def mix_wrong_moments(comm: Any, rank: int, wrong: Any) -> tuple[str, str]:
    try:
        mixture(comm, *(wrong if comm.rank == rank else ([0.0, 0.0], [1.0, 1.0])))
    except (TypeError, ValueError) as error:
        comm.barrier()  # it goes on being usable
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("text", REFUSED)
def test_refused_on_all_members(shm: RankPool, text: str, rank: int) -> None:
    kind, wrong = REFUSED[text]
    answers = shm.run(mix_wrong_moments, rank, wrong, size=2)
    name, own = answers[rank]
    assert name == kind.__name__
    assert text in own
    name, other = answers[1 - rank]
    assert name == ("OtherTypeError" if kind is TypeError else "RanksDiffer")
    assert other == f"rank {rank}: {own}"


def test_other_shapes(shm: RankPool) -> None:
    for name, message in shm.run(mix_wrong_moments, 1, ([0.0], [1.0]), size=2):
        assert name == "RanksDiffer"
        assert "differ first at the shape of rank 1: (1,); rank 0 has the shape: (2,)" in message
