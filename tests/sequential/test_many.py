"""Many small networks over ranks."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytagi
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.support import torch_group
from support.networks import NETWORKS
from support.rank_pool import RankPool
from support.reports import Report, report

from tagi_ddp import LaunchError, MapError, accelerate, init, launch, map_networks
from tagi_ddp.sequential import many
from tagi_ddp.sequential.many import _shares


def train_item(item: int) -> dict[str, Any]:
    """Train a network that the engine draws, on batches that numpy draws; some items fail."""
    if item == 5:
        raise ValueError("a series without an end")
    model = accelerate(NETWORKS["mlp"].build())
    for _ in range(3):
        x = np.random.standard_normal((4, 12)).astype(np.float32)
        mean, _ = model.learn(x, x[:, :5], 0.3)
    return {"item": item, "last": mean, "digest": model.check_replicas(), "count": np.int64(3)}


def map_over_ranks(comm: Any, items: list[int], weights: list[float] | None) -> Any:
    calls = []
    results = map_networks(
        train_item,
        items,
        weights=weights,
        seed=np.uint8(11),
        communicator=comm,
        progress=lambda *count: calls.append(count),
    )
    return results, calls


@pytest.mark.parametrize(
    "weights", [None, np.array([1.0, 9.0, 1.0, 1.0, 2.0])], ids=["none", "array"]
)
def test_equal_to_one_alone(shm: RankPool, weights: Any) -> None:
    items = [3, 4, 6, 7, 8]
    alone = [map_networks(train_item, [item], seed=11 + i)[0] for i, item in enumerate(items)]
    assert [result["item"] for result in alone] == items
    assert len({result["digest"] for result in alone}) == len(items)
    for results, calls in shm.run(map_over_ranks, items, weights, size=3):
        assert results == alone
        assert calls == [(k + 1, len(calls)) for k in range(len(calls))]


def with_errors(comm: Any) -> Any:
    try:
        map_networks(train_item, [4, 5, 6, 5], communicator=comm)
    except MapError as error:
        return str(error), error.errors, [r and r["item"] for r in error.results]


def test_errors_by_item(shm: RankPool) -> None:
    for text, errors, items in shm.run(with_errors, size=2):
        assert "2 of 4 items failed: [1, 3]" in text
        assert sorted(errors) == [1, 3]
        assert all("a series without an end" in trace for trace in errors.values())
        assert items == [4, None, 6, None]


def ends(item: str) -> str:
    """Return the item, or end as a script that does not expect to be called by others."""
    if item == "exit":
        sys.exit(0)
    if item == "cancelled":
        raise asyncio.CancelledError
    if item == "interrupt":
        raise KeyboardInterrupt
    return item


def with_ends(comm: Any) -> Any:
    try:
        map_networks(ends, ["a", "exit", "b", "cancelled", "c"], communicator=comm)
    except MapError as error:
        return error.errors, error.results


def test_an_item_that_ends_the_script_has_failed(shm: RankPool) -> None:
    for errors, results in [with_ends(None), *shm.run(with_ends, size=2)]:
        assert {index: text.split()[-1] for index, text in errors.items()} == {
            1: "0",
            3: "asyncio.exceptions.CancelledError",
        }
        assert "SystemExit: 0" in errors[1]
        assert results == ["a", None, "b", None, "c"]


def test_an_interrupt_ends_the_map() -> None:
    with pytest.raises(KeyboardInterrupt):
        map_networks(ends, ["a", "interrupt", "b"])


def end_badly(item: tuple[str, int]) -> Any:
    kind, number = item
    if kind == "exit":
        os._exit(number)
    if kind == "signal":
        os.kill(os.getpid(), number)
    if kind == "raise":
        raise ValueError(number)
    if kind == "sleep":
        time.sleep(number / 10)
    return number


# The item that ends its rank is number 3; with equal weights that is rank 1's second of 2, or the
# second of rank 0 of 3.
DEATHS = [("exit", 0), ("exit", 7), ("signal", signal.SIGKILL), ("signal", signal.SIGSEGV)]


@pytest.mark.parametrize(
    ("backend", "ranks", "death"),
    [
        ("shm", 2, DEATHS[0]),
        pytest.param("shm", 2, DEATHS[1], marks=pytest.mark.slow),
        ("shm", 3, DEATHS[2]),
        pytest.param("gloo", 3, DEATHS[3], marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_takes_its_own_items_only(
    tmp_path: Path, backend: str, ranks: int, death: tuple[str, int]
) -> None:
    items = [("", 0), ("raise", 1), ("sleep", 20), death, ("", 4), ("", 5), ("sleep", 6)]

    def task() -> None:
        with init(backend) as comm:
            try:
                map_networks(end_badly, items, communicator=comm)
            except MapError as error:
                time.sleep(0.5)  # the launcher lets a rank go on after the map
                (tmp_path / str(comm.rank)).write_text(repr((error.results, error.errors)))

    with pytest.raises(LaunchError):
        launch(task, ranks, timeout=60)
    dead = 3 % ranks
    lost = [index for index in range(3, len(items)) if index % ranks == dead]
    told = [ast.literal_eval((tmp_path / str(r)).read_text()) for r in range(ranks) if r != dead]
    assert len(list(tmp_path.iterdir())) == ranks - 1
    for results, errors in told:
        assert sorted(errors) == [1, *lost]
        assert "ValueError: 1" in errors[1]
        assert f"rank {dead} was lost in this item" in errors[3]
        assert all(f"rank {dead} was lost before this item" in errors[i] for i in lost[1:])
        assert results == [None if i in errors else number for i, (_, number) in enumerate(items)]


def test_an_interrupted_rank_is_not_waited_for(shm: RankPool) -> None:
    def task(comm: Any) -> Any:
        try:
            return map_networks(ends, ["a", "interrupt", "b", "c"], communicator=comm)
        except (MapError, KeyboardInterrupt) as error:
            return type(error).__name__, getattr(error, "results", None)

    assert shm.run(task, size=2) == [
        ("MapError", ["a", None, "b", None]),
        ("KeyboardInterrupt", None),
    ]


def digest(kind: str) -> tuple[str, str]:
    """Return the hash of a network that the engine draws, before and after a step."""
    network = NETWORKS[kind]
    built = network.build()
    if kind == "embedding":  # whose means NETWORKS sets
        built._cpp_backend.layers[0].init_weight_bias()
    model = accelerate(built)
    drawn = model.check_replicas()
    model.learn(*network.batch(0, 4), 0.5)
    return drawn, model.check_replicas()


def test_each_kind_of_layer_is_drawn_again(shm: RankPool) -> None:
    kinds = [kind for kind in NETWORKS for _ in range(2)]
    results = map_networks(digest, kinds)
    assert len({drawn for drawn, _ in results}) == len(kinds)
    pytagi.manual_seed(7)  # nothing of what was drawn before counts
    assert map_networks(digest, kinds) == results
    for theirs in shm.run(lambda comm: map_networks(digest, kinds, communicator=comm), size=3):
        # Ranks have fewer threads of torch, which round otherwise.
        assert [drawn for drawn, _ in theirs] == [drawn for drawn, _ in results]


def test_what_cannot_travel() -> None:
    with pytest.raises(MapError, match="train returned a object; return numbers"):
        map_networks(lambda _: object(), [0])
    with pytest.raises(ValueError, match="weights has 1 numbers for 2 items"):
        map_networks(train_item, [0, 1], weights=[1])


def different(comm: Any, own: dict[str, Any]) -> Report:
    arguments = {"items": [1, 2, 3], "weights": None, "seed": 0} | (own if comm.rank else {})
    return report(lambda: map_networks(str, communicator=comm, **arguments))


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"items": [1, 2]}, "the number of items of rank 1: 2; rank 0 has the number of items: 3"),
        ({"weights": [1, 1, 2]}, "weights of rank 1: [1.0, 1.0, 2.0]; rank 0 has weights: [1.0,"),
        ({"weights": [1]}, "weights has 1 numbers for 3 items"),
        ({"seed": 1}, "seed of rank 1: 1; rank 0 has seed: 0"),
        ({"items": 3}, "'int' object is not iterable"),
    ],
)
def test_arguments_that_differ(shm: RankPool, own: dict[str, Any], text: str) -> None:
    for _, message, _ in shm.run(different, own, size=2):
        assert text in message


def test_a_process_group_is_taken(shm: RankPool, tmp_path: Path) -> None:
    def task(comm: Any) -> Any:
        with torch_group(comm, str(tmp_path / "f"), "gloo") as group:
            return map_networks(lambda item: 2 * item, [1, 2, 3], communicator=group)

    assert shm.run(task, size=2) == [[2, 4, 6]] * 2


@pytest.mark.parametrize("backend", ["shm", pytest.param("gloo", marks=pytest.mark.slow)])
def test_a_rank_that_is_ready_waits_for_the_others(backend: str) -> None:
    def impatient() -> Any:
        comm = init(backend, timeout=30)
        comm.timeout = 0.5
        return comm

    def task() -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(many, "init", impatient)
            return map_networks(lambda seconds: time.sleep(seconds) or seconds, [2, 0])

    assert launch(task, 2, timeout=60) == [[2, 0]] * 2


@given(weights=st.lists(st.floats(0, 100), max_size=30), ranks=st.integers(1, 5))
def test_shares(weights: list[float], ranks: int) -> None:
    """Each item once, and no rank has more than the fair share and one item."""
    shares = _shares(weights, ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    most = sum(weights) / ranks + max(weights, default=0)
    assert all(sum(weights[i] for i in share) <= most * (1 + 1e-9) for share in shares)
