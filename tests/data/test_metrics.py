"""Exact means over ranks, and rows in the data set's order."""

import numpy as np
import pytest
from support.reports import report

from tagi_ddp.communicators import init
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.data import DistributedSampler, gather, reduce_metrics
from tagi_ddp.launcher.launch import launch


def test_metrics_of_one_rank():
    comm = SingleCommunicator()
    assert reduce_metrics(comm, 3, 4) == 0.75
    np.testing.assert_array_equal(reduce_metrics(comm, [1.0, 2.0], 4), [0.25, 0.5])
    with pytest.raises(ValueError, match="count is 0 on all ranks"):
        reduce_metrics(comm, 0.0, 0)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        reduce_metrics(comm, 0.0, -1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_of_ranks_with_uneven_shares_are_those_of_one_process(ranks):
    errors = np.random.default_rng(0).integers(0, 2, (50, 2))
    shares = [[0, 50], [7, 43], [50, 0]] if ranks == 2 else [[0, 0, 50], [1, 40, 9]]

    def fn():
        with init("shm", timeout=20) as comm:
            means = []
            for counts in shares:
                start = sum(counts[: comm.rank])
                mine = errors[start : start + counts[comm.rank]]
                total = mine.sum(axis=0, dtype=float)
                means.append(reduce_metrics(comm, total, len(mine)))
                np.testing.assert_array_equal(total, mine.sum(axis=0))
            with pytest.raises(ValueError, match="count is 0 on all ranks"):
                reduce_metrics(comm, 0.0, 0)
            return means

    for means in launch(fn, ranks, timeout=60):
        for mean in means:
            np.testing.assert_array_equal(mean, errors.sum(axis=0) / 50)


def gathered(comm, count, width, seed):
    """Return what the ranks gather of a data set's rows, by shares of uneven batches."""
    data = np.random.default_rng(0).standard_normal((count, *width)).astype(np.float32)
    sampler = DistributedSampler(count, comm.size, comm.rank, seed=seed)
    share = np.concatenate([*sampler.batches(7), np.empty(0, np.int64)])
    whole = gather(comm, data[share], share)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(whole, data)
    in_turn = gather(comm, np.full(comm.rank, comm.rank))
    assert in_turn.tolist() == [rank for rank in range(comm.size) for _ in range(rank)]


@pytest.mark.parametrize("width", [(), (3,), (2, 0), (2, 2)])
@pytest.mark.parametrize("count", [1, 2, 20])
def test_rows_are_gathered_in_the_order_of_the_data(shm, count, width):
    shm.run(gathered, count, width, 5, size=3)


def padded(comm):
    sampler = DistributedSampler(7, comm.size, comm.rank)  # some come twice
    indices = list(sampler)
    assert gather(comm, np.array(indices) * 10, indices).tolist() == list(range(0, 70, 10))


def test_padded_shares_are_gathered_once(shm):
    shm.run(padded, size=3)


def wrong(comm, rows, indices, own_rows, own_indices):
    if comm.rank == 1:
        rows, indices = own_rows, own_indices
    return report(lambda: gather(comm, rows, indices))


@pytest.mark.parametrize(
    ("rows", "indices", "own_rows", "own_indices", "text"),
    [
        ([1.0], None, ["a"], None, "rank 1: rows must be numbers"),
        ([1.0], [0], [1.0, 2.0], [1], "rank 1: indices has 1 numbers for 2 rows"),
        ([1.0], [0], [1.0], [-1], "rank 1: indices must not be negative, got -1"),
        ([1.0], None, [1], None, "dtypes of rows differ between ranks"),
        ([1.0], None, [[1.0]], None, "shapes of rows differ between ranks"),
        ([1.0], None, [1.0], [1], "uses of indices differ between ranks"),
        ([1.0], [0], [1.0], [2], "indices leave out 1: no rank has a row for it"),
    ],
)
def test_rows_that_do_not_fit_are_named(shm, rows, indices, own_rows, own_indices, text):
    for kind, message, _ in shm.run(wrong, rows, indices, own_rows, own_indices, size=2):
        assert kind == "ValueError"
        assert text in message
