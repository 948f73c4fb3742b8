"""Predicted times: numbers worked out by hand, and what must hold for all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tagi_ddp.communicators.two_level import CHUNK
from tagi_ddp.plan import (
    SCHEMES,
    Cluster,
    Link,
    Training,
    default_ranks,
    memory,
    predict,
    search,
    table,
)
from tagi_ddp.plan.model import all_reduce
from tagi_ddp.plan.search import Budget, fewest_ranks

CLUSTER = Cluster(node=Link(1e-3, 1e6), across=Link(1e-2, 1e5), ranks_per_node=2)
TRAINING = Training(step=1.0, parameters=1000, sync_every=4)  # 8000 bytes

LINKS = st.builds(Link, st.floats(0, 1), st.floats(1e3, 1e12))
CLUSTERS = st.builds(Cluster, LINKS, LINKS, st.integers(1, 9))
TRAININGS = st.builds(
    Training,
    st.floats(1e-5, 10),
    st.floats(1, 1e9),
    sync_every=st.integers(1, 10),
    batches=st.integers(1, 30),
    epochs=st.integers(1, 10),
    merge=st.floats(0, 1e-6),
    warmup_epochs=st.integers(0, 3),
    cooldown_epochs=st.integers(0, 3),
    max_global_skips=st.integers(1, 12),
    local_skip_factor=st.integers(1, 12),
)
RANKS = st.integers(1, 10_000)
ROUNDING = 1 + 1e-9


# By hand.


def test_one_node() -> None:
    # A vote: 1 ms. A sum: 2 ms, and 4000 bytes twice.
    found = predict(TRAINING, CLUSTER, 2)
    assert found["sum"] == pytest.approx(1 + 0.001 + 0.010)
    assert found["precision"] == pytest.approx(1 + 0.011 / 4)


def test_two_nodes() -> None:
    # A vote: 1 ms in the node, 10 ms between nodes. A sum: 10 ms, and 20 + 80 ms.
    found = predict(TRAINING, CLUSTER, 4)
    vote, local, between = 0.011, 0.010, 0.1
    assert found["sum"] == pytest.approx(1 + vote + local + between)
    broadcast = local / 2
    assert found["precision"] == pytest.approx(1 + (vote + local + between + broadcast) / 4)


def test_more_nodes_take_more_steps() -> None:
    cluster = Cluster(Link(0, math.inf), Link(1, math.inf), 1)
    for ranks, steps in ((2, 1), (3, 2), (4, 2), (5, 3), (1024, 10)):
        assert predict(TRAINING, cluster, ranks)["sum"] == pytest.approx(1 + 3 * steps)


def test_levels_are_at_work_at_once_but_for_a_chunk() -> None:
    # 16 chunks; 2 s in a node, 1 s between two nodes, or the other way round.
    size = 16 * CHUNK
    for node, across in ((2.0, 1.0), (1.0, 2.0)):
        cluster = Cluster(Link(0, size / node), Link(0, size / across), 2)
        assert all_reduce(cluster, 4, size) == pytest.approx(2 + 1 / 16)


def test_a_node_may_be_filled_in_part() -> None:
    assert CLUSTER.nodes(3) == 2
    assert predict(TRAINING, CLUSTER, 3) == predict(TRAINING, CLUSTER, 4)


def test_each_level_of_a_merge_has_its_arithmetic() -> None:
    training = replace(TRAINING, merge=1e-3)  # 8 s
    for ranks, merges in ((2, 1), (4, 2)):
        more = [predict(each, CLUSTER, ranks) for each in (training, TRAINING)]
        assert more[0]["precision"] - more[1]["precision"] == pytest.approx(8 * merges / 4)
        assert more[0]["sum"] == more[1]["sum"]


def test_a_merge_waits_for_the_rest_of_what_was_sent() -> None:
    # Batches 0 and 2 send, 1 and 3 merge, the last one, 4, blocks. A transfer takes 1.5 steps.
    training = Training(
        1.0, 1000, batches=5, epochs=3, warmup_epochs=0, cooldown_epochs=0, max_global_skips=2
    )
    cluster = Cluster(Link(0, 1), Link(0, 8000 / 1.5), 1)
    waits = 0.5 + 0.5 + 1.5
    assert predict(training, cluster, 2)["asynchronous"] == pytest.approx(1 + waits / 5)
    # Of three epochs two block after every batch.
    around = replace(training, warmup_epochs=1, cooldown_epochs=1)
    expected = 1 + (2 * 5 * 1.5 + waits) / 15
    assert predict(around, cluster, 2)["asynchronous"] == pytest.approx(expected)
    # Two batches hide it: batch 0 sends, 2 merges, 3 blocks.
    patient = replace(training, batches=4, epochs=1, max_global_skips=8)
    assert predict(patient, cluster, 2)["asynchronous"] == pytest.approx(1 + 1.5 / 4)
    # What takes less than a step is hidden.
    fast = Cluster(Link(0, 1), Link(0, 8000 / 0.9), 1)
    assert predict(training, fast, 2)["asynchronous"] == pytest.approx(1 + 0.9 / 5)


def test_merges_in_a_node_are_not_hidden_but_hide() -> None:
    # Skips 4, 2 and 1. Batches 0 and 4 send, 1 merges; 0, 1, 2 and 4 merge the node; 5 blocks.
    training = Training(
        1.0,
        1000,
        batches=6,
        epochs=1,
        warmup_epochs=0,
        cooldown_epochs=0,
        max_global_skips=4,
        local_skip_factor=2,
    )
    cluster = Cluster(Link(0, 1e5), Link(0, 8000 / 1.5), 2)
    local, broadcast, transfer = 0.08, 0.04, 1.5
    stall = transfer - 1 - local + broadcast  # batch 5 waits without a merge of the node
    last = transfer - 1 + broadcast + local + transfer + broadcast
    expected = 1 + (4 * local + stall + last) / 6
    assert predict(training, cluster, 4)["asynchronous"] == pytest.approx(expected)


def test_few_bits() -> None:
    # A vote before the merge, one for the exchange, each 10 ms; a quarter of 8000 bytes and 8000 /
    # 256, and 8000 / 512: of each as many bytes leave a node, and 20 ms pass.
    cluster = Cluster(Link(0, math.inf), Link(1e-2, 1e5), 1)
    found = predict(replace(TRAINING, sync_every=1, bits=8), cluster, 2)["precision"]
    assert found == pytest.approx(1 + 6 * 0.01 + (2031.25 + 15.625) / 1e5)
    with pytest.raises(ValueError, match="bits must be 32, 16 or 8, got 4"):
        replace(TRAINING, bits=4)


SUMS = ((1e3, 1e-3), (1e5, 1e-2), (1e7, 1.0))


def test_measured_sums_are_interpolated() -> None:
    link = Link(1e-4, 1e7, SUMS, 2)
    for size, seconds in ((1, 1e-3), (1e3, 1e-3), (1e4, 10**-2.5), (1e5, 1e-2), (1e6, 0.1)):
        assert link.all_reduce(2, size) == pytest.approx(seconds)
    assert link.all_reduce(2, 3e7) == pytest.approx(3.0)
    plain = Link(1e-4, 1e7)  # scales them to other numbers of ranks
    scale = plain.all_reduce(8, 1e5) / plain.all_reduce(2, 1e5)
    assert link.all_reduce(8, 1e5) == pytest.approx(1e-2 * scale)
    assert link.all_reduce(1, 1e5) == 0.0
    assert Link(1e-4, 1e7).all_vote(8) == pytest.approx(3e-4)
    voted = Link(1e-4, 1e7, SUMS, 4, 0.5)
    assert [voted.all_vote(ranks) for ranks in (1, 2, 4, 8)] == [0.0, 0.25, 0.5, 0.75]


@given(
    st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e2)), min_size=2, max_size=6),
    st.floats(1, 1e10),
    st.floats(1, 100),
)
def test_more_bytes_never_take_less_time(
    sums: list[tuple[float, float]], size: float, times: float
) -> None:
    link = Link(1e-5, 1e9, tuple(sorted(sums)), 4)
    assert link.all_reduce(4, size) <= link.all_reduce(4, size * times) * ROUNDING


@pytest.mark.parametrize(
    ("across", "expected"),
    [
        (Link(0, math.inf), "sum"),
        (Link(2e-2, 1e6), "precision, every 2"),
        (Link(2e-2, 1e5), "precision, every 4"),
        (Link(1e-2, 3e2), "asynchronous, every 32, int8"),
    ],
)
def test_the_search_is_as_cautious_as_the_network_lets_it_be(across: Link, expected: str) -> None:
    cluster = Cluster(Link(0, math.inf), across, 1)
    training = replace(TRAINING, warmup_epochs=0, cooldown_epochs=0)
    assert str(search(training, cluster, 2)) == expected


def test_memory() -> None:
    def held(scheme: str, ranks: int, **more: Any) -> float:
        return memory(replace(TRAINING, **more), CLUSTER, ranks, scheme) / 8000

    assert [held("sum", ranks) for ranks in (1, 2, 4)] == [5, 5, 5]
    assert [held("precision", ranks) for ranks in (1, 2, 4)] == [5, 9, 13]
    assert held("asynchronous", 4, bits=8) == 18
    single = replace(CLUSTER, ranks_per_node=1)
    assert memory(TRAINING, single, 2, "precision") == 12 * 8000


# For all.


@settings(max_examples=30)
@given(TRAININGS, CLUSTERS, RANKS)
def test_the_search_finds_nothing_slower(training: Training, cluster: Cluster, ranks: int) -> None:
    found = search(training, cluster, ranks)
    least = min(
        predict(replace(training, sync_every=k, max_global_skips=k, bits=bits), cluster, ranks)[
            scheme
        ]
        for scheme in SCHEMES
        for k in (1, 8, 32)
        for bits in (32, 8)
    )
    assert training.step <= found.seconds <= 1.05 * least * ROUNDING


@settings(max_examples=30)
@given(TRAININGS, CLUSTERS, st.floats(0.01, 1e4), st.floats(1e-3, 10))
def test_the_fewest_ranks_within_a_budget(
    training: Training, cluster: Cluster, speed: float, memories: float
) -> None:
    """Check that a choice keeps the budget. If there is none, the most ranks exceed it, too."""
    budget = Budget(1e6, 1e6 * training.step / speed, memories * 20 * 8 * training.parameters)
    found = fewest_ranks(training, cluster, budget, 64)
    if found is None:
        most = 64 // cluster.ranks_per_node * cluster.ranks_per_node or 64
        choice = search(training, cluster, most)
        assert speed * choice.seconds * ROUNDING >= training.step * most or (
            choice.memory(training, cluster, most) > budget.memory
        )
        return
    ranks, choice = found
    assert choice.seconds * budget.shares / ranks <= budget.seconds
    assert choice.memory(training, cluster, ranks) <= budget.memory
    assert ranks >= speed / ROUNDING


@given(TRAININGS, CLUSTERS, RANKS)
def test_no_step_is_faster_than_alone(training: Training, cluster: Cluster, ranks: int) -> None:
    found = predict(training, cluster, ranks)
    assert tuple(found) == SCHEMES
    assert all(time >= training.step for time in found.values())
    assert set(predict(training, cluster, 1).values()) == {training.step}


@settings(max_examples=60)
@given(TRAININGS, CLUSTERS, RANKS, st.floats(1, 10), st.sampled_from(["node", "across"]))
def test_worse_is_slower(
    training: Training, cluster: Cluster, ranks: int, times: float, which: str
) -> None:
    link = getattr(cluster, which)
    before = predict(training, cluster, ranks)
    larger = replace(training, parameters=training.parameters * times)
    for worse in (
        (larger, cluster),
        (replace(training, merge=training.merge * times), cluster),
        (training, replace(cluster, **{which: Link(link.latency * times, link.bandwidth)})),
        (training, replace(cluster, **{which: Link(link.latency, link.bandwidth / times)})),
    ):
        after = predict(*worse, ranks)
        assert all(before[scheme] <= after[scheme] * ROUNDING for scheme in SCHEMES)


@given(TRAININGS, CLUSTERS, RANKS)
def test_a_merge_at_every_step_on_one_level_is_as_long_as_a_sum(
    training: Training, cluster: Cluster, ranks: int
) -> None:
    every = replace(training, sync_every=1, merge=0.0)
    for level in (replace(cluster, ranks_per_node=10_000), replace(cluster, ranks_per_node=1)):
        found = predict(every, level, ranks)
        assert found["precision"] == pytest.approx(found["sum"])


@given(TRAININGS, CLUSTERS, RANKS)
def test_asynchronous_merges_are_no_slower_than_blocking_at_every_step(
    training: Training, cluster: Cluster, ranks: int
) -> None:
    found = predict(replace(training, sync_every=1), cluster, ranks)
    blocking = predict(replace(training, warmup_epochs=training.epochs), cluster, ranks)
    assert blocking["asynchronous"] == pytest.approx(found["precision"])
    assert found["asynchronous"] <= blocking["asynchronous"] * ROUNDING


# Arguments.


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Link(-1, 1), "latency must be 0 or more, and finite, got -1"),
        (lambda: Link(0, 0), "bandwidth must be greater than 0, got 0"),
        (lambda: Link(0, float("nan")), "bandwidth must be greater than 0, got nan"),
        (lambda: Cluster(Link(0, 1), Link(0, 1), 0), "ranks_per_node must be at least 1, got 0"),
        (lambda: Training(0, 1), "step must be greater than 0, got 0"),
        (lambda: Training(1, float("inf")), "parameters must be finite, got inf"),
        (lambda: Training(1, 1, merge=-1), "merge must be 0 or more, and finite, got -1"),
        (lambda: Training(1, 1, batches=0), "batches must be at least 1, got 0"),
        (lambda: Training(1, 1, max_global_skips=0), "max_global_skips must be at least 1, got 0"),
        (lambda: predict(TRAINING, CLUSTER, 0), "ranks must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_named(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_wrong_types_are_named() -> None:
    with pytest.raises(TypeError, match="step must be a number, got '1'"):
        Training("1", 1)


def test_ranks_go_up_in_powers_of_two() -> None:
    assert default_ranks(1) == [1]
    assert default_ranks(8) == [1, 2, 4, 8]
    assert default_ranks(9) == [1, 2, 4, 8, 9]
    assert default_ranks()[-3:] == [4096, 8192, 10_000]


# The command.


def test_the_table() -> None:
    lines = [" ".join(line.split()) for line in table(TRAINING, CLUSTER, [1, 4]).splitlines()]
    scheme = "ms efficiency"
    assert lines[:4] == [
        f"ranks nodes sum {scheme} precision {scheme} asynchronous {scheme} best ms MB by",
        "1 1 1000 100.0% 1000 100.0% 1000 100.0% 1000 0.040 sum",
        "4 2 1121 89.2% 1032 96.9% 1055 94.8% 1048 0.144 precision, every 2, int8",
        "",
    ]
    short = table(replace(TRAINING, step=0.0005), CLUSTER, [1]).splitlines()[1]
    assert short.split()[2:4] == ["0.500", "100.0%"]
