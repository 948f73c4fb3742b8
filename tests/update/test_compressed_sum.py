"""Sums of changes in few bits: how exact, that nothing is lost for good, and equal on all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import NETWORKS, fresh, learn, parameters
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim import SyncSchedule
from tagi_ddp.replica.codec import Codec
from tagi_ddp.update.compressed_sum import CompressedSum
from update import linear

BLOCK = 256
ERRORS = {8: 1 / 254, 16: 1 / 256}  # of the largest of a block, of the number


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 4), st.sampled_from([8, 16]), st.integers(-30, 30), st.integers(0, 2**32 - 1))
def test_what_is_dropped_is_left(blocks: int, bits: int, decades: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=blocks * BLOCK) * 10.0**decades).astype(np.float32)
    values[rng.integers(0, values.size, 9)] = 0
    codec, left = Codec(bits), values.copy()
    sent, found = codec.compress(left), codec.floats(values.size)
    assert sent.size == (blocks * (BLOCK + 4) if bits == 8 else 2 * values.size)
    largest = np.abs(values.reshape(blocks, -1)).max(1).repeat(BLOCK)
    limit = ERRORS[bits] * (largest if bits == 8 else np.abs(values))
    codec.add(sent, found)
    assert (np.abs(found - values) <= 1.01 * limit).all()
    assert (np.abs(found + left - values) <= 1e-6 * largest).all()


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -3.39e38])
def test_what_cannot_be_sent_is_dropped_for_good(bits: int, bad: float) -> None:
    codec = Codec(bits)
    values = codec.floats(2 * BLOCK)
    values[5], values[7], values[BLOCK + 1] = 1.0, bad, 1e-42
    message, found = codec.compress(values), codec.floats(2 * BLOCK)
    codec.add(message, found)
    assert [float(found[5]), float(found[7])] == [1, 0]
    assert np.abs(values).max() <= 1e-7


def repeat(comm: Any, compress: Any, times: int) -> tuple[float, float, list[float]]:
    """Sum the same changes again and again; returns the errors of one sum and of their mean."""
    model = DDPSequential(fresh("mlp"), communicator=comm, reduction="precision")
    size = model._local.replica.parameters.size
    rng = np.random.default_rng(1)
    variances = 10.0 ** rng.uniform(-4, 0, size)
    before = np.concatenate([rng.normal(size=size), variances]).astype(np.float32)
    scale = np.concatenate([1 / variances, 1 / np.sqrt(variances)])
    changes = rng.normal(size=(comm.size, 2 * size))
    expected, total, first = changes.sum(0), np.zeros(2 * size), 0.0
    whole = CompressedSum(comm, model._local.replica, compress)
    for _ in range(times):
        change = (changes[comm.rank] * scale).astype(np.float32)
        squares = np.full(3, comm.rank, np.float32)
        whole.start(change, squares, before).wait()
        assert squares.tolist() == [sum(range(comm.size))] * 3
        first = first or float(np.abs(change / scale - expected).max())
        total += change / scale
    return first, float(np.abs(total / times - expected).max()), change.tolist()


@pytest.mark.parametrize("compress", ["bf16", "int8"])
def test_what_rounding_drops_is_sent_later(shm: RankPool, compress: str) -> None:
    answers = shm.run(repeat, compress, 50, size=3)
    for first, mean, _ in answers:
        assert 1e-3 < first < 0.2
        assert mean < first / 15
    assert answers[0][2] == answers[1][2] == answers[2][2]


def train_and_merge(comm: Any, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    model = DDPSequential(fresh("mlp"), communicator=comm, reduction="precision", **options)
    scheduled = isinstance(options["sync_every"], SyncSchedule)
    if scheduled:
        model.begin_epoch(12)
    for step in range(12):
        learn(model, *NETWORKS["mlp"].batch(100 * comm.rank + step, 6))
        model.step()
    if scheduled:
        model.end_epoch(1.0)
    model.merge()
    return parameters(model), model.check_replicas()


def apart(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the distance of the means, in the standard deviations that they should have."""
    squares = [
        (np.subtract(a[name][0], b[name][0]) ** 2 / np.asarray(b[name][1])).mean() for name in b
    ]
    return float(np.sqrt(np.mean(squares)))


@pytest.mark.parametrize("compress", ["bf16", "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 2},
        {"sync_every": 2, "device": "cpu:0"},
        {"sync_every": 2, "node_size": 2},
        {"sync_every": SyncSchedule(1, 0, 0, max_global_skips=4), "node_size": 2},
    ],
    ids=["one level", "device", "two levels", "schedule"],
)
@pytest.mark.parametrize(
    "pool",
    ["shm", "gloo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpi", "nccl"))],
    indirect=True,
)
def test_training_ends_where_it_does_without(
    pool: RankPool, options: dict[str, Any], compress: str
) -> None:
    if pool.backend == "nccl":
        options = {**options, "device": "cpu:0"}
    size = 2
    if "node_size" in options:
        size = min(4, pool.size)
        options = {**options, "node_size": size // 2}
    exact = pool.run(train_and_merge, options, size=size)[0][0]
    answers = pool.run(train_and_merge, {**options, "compress": compress}, size=size)
    assert len({digest for _, digest in answers}) == 1
    assert 0 < apart(answers[0][0], exact) < 0.05


def learn_exactly(comm: Any, spread: float, options: dict[str, Any]) -> tuple[list[float], str]:
    """Train a linear model whose posterior is known; return its distance from that, and its hash.

    Distances are those after each merge of news, then those after merges without news.
    """
    model = DDPSequential(
        linear.network(), communicator=comm, reduction="precision", merge="bayes", **options
    )
    exact, found, news, quiet = linear.weights(model), [], 6, 4
    steps = options["sync_every"]
    for first in range(0, news * steps, steps):
        for step in range(first, first + steps):
            linear.learn(model, linear.samples(comm.rank, step, spread))
        assert model.unmerged_steps == 0
        batches = [
            linear.samples(rank, step, spread)
            for rank in range(comm.size)
            for step in range(first, first + steps)
        ]
        exact = linear.closed_form(*exact, batches)
        found.append(linear.distance(model, exact))
    for _ in range(quiet):
        model.merge()
        found.append(linear.distance(model, exact))
    return found, model.check_replicas()


@pytest.mark.parametrize("compress", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (2, {"sync_every": 16}),
        (3, {"sync_every": 5, "device": "cpu:0"}),
        (4, {"sync_every": 8}),
        (4, {"sync_every": 8, "node_size": 2}),
    ],
    ids=["two", "three on devices", "four", "two nodes"],
)
def test_the_posterior_is_the_exact_one_once_all_is_sent(
    shm: RankPool, size: int, options: dict[str, Any], compress: str
) -> None:
    """Between merges variances fall to as little as a half, and means move.

    So a residual in units of a prior, or relative to its means, would come back as something else.
    """
    spread = 2.5
    exact = shm.run(learn_exactly, spread, options, size=size)[0][0]
    assert max(exact) < 1e-5
    answers = shm.run(learn_exactly, spread, {**options, "compress": compress}, size=size)
    assert len({digest for _, digest in answers}) == 1
    for distances, _ in answers:
        assert 1e-4 < max(distances) < 0.03
        assert distances[-1] < 1e-5


def load_after_compressed_merges(comm: Any) -> tuple[bool, bool]:
    """Load what was before merges that have dropped something; then merge nothing."""
    model = DDPSequential(
        fresh("mlp"), communicator=comm, reduction="precision", sync_every=2, compress="int8"
    )
    kept, first = model.state_dict(), model.check_replicas()
    for step in range(4):
        learn(model, *NETWORKS["mlp"].batch(100 * comm.rank + step, 6))
        model.step()
    moved = model.check_replicas()
    model.merge()
    late = model.check_replicas()  # what was dropped has been sent
    model.load_state_dict(kept)
    model.merge()
    return moved != late, model.check_replicas() == first


def test_loading_forgets_what_has_not_been_sent(shm: RankPool) -> None:
    assert shm.run(load_after_compressed_merges, size=2) == [(True, True)] * 2


def test_a_residual_in_the_units_of_an_earlier_version_is_dropped() -> None:
    comm = SingleCommunicator()
    model = DDPSequential(fresh("mlp"), communicator=comm, reduction="precision")
    whole = CompressedSum(comm, model._local.replica, "int8")
    kept = whole.state_dict()
    kept["own"][:] = 1
    old = {
        "own": np.ones(2 * model._local.replica.parameters.size, np.float32),
        "part": kept["part"],
    }
    with pytest.warns(RuntimeWarning, match="rounding error of compress= in other units"):
        whole.load_state_dict(old)
    assert not any(array.any() for array in whole.state_dict().values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"reduction": "precision", "compress": "int4"}, "got 'int4'"),
        ({"compress": "int8"}, "whose sums are exact"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DDPSequential(fresh("mlp"), communicator=SingleCommunicator(), **options)
