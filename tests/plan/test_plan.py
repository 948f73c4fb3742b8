"""Predicted times: numbers worked out by hand, and what must hold for all."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    # Agreeing: 2 ms. all_reduce: 3 ms, and 4000 bytes twice.
    found = predict(TRAINING, CLUSTER, 2)
    assert found["sum"] == pytest.approx(1 + 0.002 + 0.003 + 0.008)
    assert found["precision"] == pytest.approx(1 + 0.013 / 4)


def test_two_nodes() -> None:
    # The vote is a handshake; 8000 bytes are few, and travel at once.
    found = predict(TRAINING, CLUSTER, 4)
    vote, between = 0.01, 0.02 + 0.08
    assert found["sum"] == pytest.approx(1 + vote + 2 * (0.001 + 0.004) + between)
    local, broadcast = 0.003 + 0.008, 0.002 + 0.008
    assert found["precision"] == pytest.approx(1 + (vote + local + between + broadcast) / 4)


def test_chunks_are_on_both_levels_at_once() -> None:
    # 16e6 bytes, in 2 chunks; in a node each takes 2 * 1 s, or 2 * 1/10 s; between nodes 0.6 s.
    # All wait together for the latency: that of a vote's handshake, and the ring's four.
    training, latency = Training(1.0, 2e6), 0.01
    for bandwidth, first, others in ((4e6, 2.0, 2.0), (4e7, 0.2, 0.6)):
        cluster = Cluster(Link(0, bandwidth), Link(latency, 4e7 / 3), 2)
        expected = 1 + first + 0.6 + others + 5 * latency
        assert predict(training, cluster, 4)["sum"] == pytest.approx(expected)


def test_a_handshake_takes_more_rounds_among_more_ranks() -> None:
    cluster = Cluster(Link(0, math.inf), Link(1, math.inf), 1)
    # Of a vote a handshake, of a sum a message for each factor, or in a ring.
    large = replace(TRAINING, parameters=1e6)
    for ranks, rounds, steps in ((4, 1, 2), (5, 2, 1), (16, 2, 4), (17, 3, 1)):
        expected = 1 + rounds + 2 * steps
        assert predict(TRAINING, cluster, ranks)["sum"] == pytest.approx(expected)
        expected = 1 + rounds + 4 * (ranks - 1)
        assert predict(large, cluster, ranks)["sum"] == pytest.approx(expected)


def test_a_node_may_be_filled_in_part() -> None:
    assert CLUSTER.nodes(3) == 2
    assert predict(TRAINING, CLUSTER, 3) == predict(TRAINING, CLUSTER, 4)


def test_each_level_of_a_merge_has_its_arithmetic() -> None:
    training = replace(TRAINING, merge=1e-3)  # 8 s
    for ranks, merges in ((2, 1), (4, 2)):
        more = [predict(each, CLUSTER, ranks) for each in (training, TRAINING)]
        assert more[0]["precision"] - more[1]["precision"] == pytest.approx(8 * merges / 4)
        assert more[0]["sum"] == more[1]["sum"]
    single = replace(CLUSTER, ranks_per_node=1)
    assert predict(training, single, 2)["precision"] == pytest.approx(1 + (0.01 + 0.1 + 8) / 4)


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
    local, broadcast, transfer = 0.08, 0.08, 1.5
    stall = transfer - 1 - local + broadcast  # batch 5 waits without a merge of the node
    last = transfer - 1 + broadcast + local + transfer + broadcast
    expected = 1 + (4 * local + stall + last) / 6
    assert predict(training, cluster, 4)["asynchronous"] == pytest.approx(expected)


def test_few_bits() -> None:
    # Between 2 nodes: a handshake and a phase of a quarter of 8000 bytes and 8000 / 256, twice;
    # and an all_reduce of 8000 / 512, with a handshake's messages.
    cluster = Cluster(Link(0, math.inf), Link(1e-2, 1e5), 1)
    found = predict(replace(TRAINING, sync_every=1, bits=8), cluster, 2)["precision"]
    vote, squares = 0.01, 0.01
    assert found == pytest.approx(1 + vote + 2 * 0.03 + 2031.25 / 1e5 + squares)
    with pytest.raises(ValueError, match="bits must be 32, 16 or 8, got 4"):
        replace(TRAINING, bits=4)


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
    """What is found keeps within it; none is found where the most ranks would not do either."""
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
    flat = replace(cluster, ranks_per_node=1)  # a chunk more on two levels may save time
    more = predict(replace(training, parameters=training.parameters * times), flat, ranks)
    assert all(predict(training, flat, ranks)[s] <= more[s] * ROUNDING for s in SCHEMES)
    for worse in (
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
    # Asynchronous: 8 epochs of 100 * 0.131 s, and 12 of 63 * 0.011 + 13 * 0.010 + 0.131 s.
    lines = [" ".join(line.split()) for line in table(TRAINING, CLUSTER, [1, 4]).splitlines()]
    scheme = "ms efficiency"
    assert lines[:4] == [
        f"ranks nodes sum {scheme} precision {scheme} asynchronous {scheme} best ms MB by",
        "1 1 1000 100.0% 1000 100.0% 1000 100.0% 1000 0.040 sum",
        "4 2 1120 89.3% 1033 96.8% 1058 94.5% 1033 0.104 precision, every 4",
        "",
    ]
    short = table(replace(TRAINING, step=0.0005), CLUSTER, [1]).splitlines()[1]
    assert short.split()[2:4] == ["0.500", "100.0%"]
