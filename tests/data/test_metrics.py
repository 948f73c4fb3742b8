"""Exact means over ranks, and rows in the data set's order."""

import numpy as np
import pytest
from parallel.support import torch_group
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


def gather_rows(comm, count, width, seed):
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
    shm.run(gather_rows, count, width, 5, size=3)


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
        ([1.0], None, ["a"], None, "rows must be numbers"),
        ([1.0], [0], [1.0, 2.0], [1], "indices has 1 numbers for 2 rows"),
        ([1.0], [0], [1.0], [-1], "indices must not be negative, got -1"),
        ([1.0], [0], [1.0], ["a"], "indices must be integers, got <U1"),
        ([1.0], [0], [1.0], [0.5], "indices must be integers, got float64"),
        (
            [1.0],
            None,
            [1],
            None,
            "the dtype of rows of rank 1: int64; rank 0 has the dtype of rows: float64",
        ),
        (
            [1.0],
            None,
            [[1.0]],
            None,
            "the shape of a row of rank 1: (1,); rank 0 has the shape of a row: ()",
        ),
        ([1.0], None, [1.0], [1], "indices of rank 1: one for each row; rank 0 has indices: none"),
        ([1.0], [0], [1.0], [2], "indices leave out 1: no rank has a row for it"),
    ],
)
def test_rows_that_do_not_fit_are_named(shm, rows, indices, own_rows, own_indices, text):
    for kind, message, _ in shm.run(wrong, rows, indices, own_rows, own_indices, size=2):
        assert kind in ("ValueError", "RanksDiffer")
        assert text in message


@pytest.mark.parametrize(
    ("total", "count", "text"),
    [
        (1.0, -1, "count must be at least 0, got -1"),
        ("x", 3, "total must be real numbers, got <U1"),
        ([1.0, 2.0], 3, "the shape of total of rank 1: (2,); rank 0 has the shape of total: ()"),
    ],
)
def test_metrics_that_do_not_fit_are_named(shm, total, count, text):
    def wrong_metrics(comm):
        own = (total, count) if comm.rank == 1 else (1.0, 3)
        return report(lambda: reduce_metrics(comm, *own))

    for kind, message, _ in shm.run(wrong_metrics, size=2):
        assert kind in ("ValueError", "RanksDiffer")
        assert text in message


def test_bools_and_foreign_byte_order(shm):
    def task(comm):
        hits = gather(comm, np.array([[True, False], [comm.rank == 1, True]]))
        assert hits.dtype == bool
        assert hits.tolist() == [[True, False], [False, True], [True, False], [True, True]]
        swapped = gather(comm, np.array([1.5, comm.rank], ">f4" if comm.rank else "<f4"))
        assert swapped.dtype == np.float32
        assert swapped.dtype.isnative
        assert swapped.tolist() == [1.5, 0.0, 1.5, 1.0]

    shm.run(task, size=2)


def found_together(comm):
    """Reduce metrics, and gather rows that differ in number, on two ranks."""
    means = reduce_metrics(comm, [1.0, 2.0], 2)
    assert means.tolist() == [0.5, 1.0]
    assert reduce_metrics(comm, 3, 4) == 0.75
    rank = comm.rank() if callable(comm.rank) else comm.rank
    rows = np.full((rank + 1, 2), rank, np.int16)
    rows.flags.writeable = False
    assert gather(comm, rows, np.arange(rank + 1) + rank).tolist() == [[0, 0], [1, 1], [1, 1]]


def test_a_process_group_is_taken(shm, tmp_path):
    def task(comm):
        with torch_group(comm, str(tmp_path / "f"), "gloo") as group:
            found_together(group)

    shm.run(task, size=2)


def test_buffers_are_where_the_communicator_has_them(nccl):
    """As on a GPU, whose place "cpu:0" takes: arrays of the host would be refused there."""

    def task(comm):
        import torch

        taken = type(comm)._elements

        def elements(self, buffer, name, *, writable=False):
            assert isinstance(buffer, torch.Tensor)
            return taken(self, buffer, name, writable=writable)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(comm, "device", "cpu:0")
            patch.setattr(type(comm), "_elements", elements)
            found_together(comm)

    nccl.run(task, size=2)
