"""Merging with everything else: devices, refusals, ranks out of data, files, errors."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, distance, fresh, learn, parameters, parameters_and_averages
from support.rank_pool import RankPool
from support.reports import (
    NO_ERROR,
    Report,
    report,
    report_if_any,
    set_delta_variances,
    wrap_merging,
)

from tagi_ddp import DDPSequential, NotFiniteError, ReplicaMismatch, accelerate
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim import SyncSchedule

Options = dict[str, Any]


def schedule(**options: Any) -> SyncSchedule:
    return SyncSchedule(3, warmup_epochs=0, cooldown_epochs=1, max_global_skips=4, **options)


# --- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_one_process_just_trains(device: str) -> None:
    models = [
        accelerate(fresh("mlp"), device=device),
        wrap_merging(SingleCommunicator(), device=device),
        wrap_merging(SingleCommunicator(), device=device, sync_every=3),
        wrap_merging(SingleCommunicator(), device=device, sync_every=schedule()),
    ]
    models[3].begin_epoch(5)
    for step in range(5):
        for model in models:
            learn(model, *NETWORKS["mlp"].batch(step, 6))
            model.step()
    assert [model.unmerged_steps for model in models] == [0, 0, 2, 0]
    assert [m._ranks.exchange.state_dict()["node"]["steps"] for m in models[1:]] == [0, 2, 0]
    assert len({model.check_replicas() for model in models}) == 1


# --- many ranks ------------------------------------------------------------------------------


def train_between_merges(
    comm: Any, name: str, options: Options, shares: int
) -> dict[str, list[np.ndarray]]:
    """Micro-batches, shares that differ, and more steps than merges."""
    model = wrap_merging(comm, name, **options)
    scheduled = isinstance(options.get("sync_every"), SyncSchedule)
    for epoch in range(2):
        if scheduled:
            model.begin_epoch(6)
        for step in range(6):
            part = [
                NETWORKS[name].batch(100 * epoch + 10 * comm.rank + step + i, 5) for i in (0, 50)
            ]
            if step % 2:
                with model.no_sync():
                    for batch in part:
                        learn(model, *batch)
            elif step > 2 and comm.rank:  # no data
                model(part[0][0][:0])
                model.backward()
            else:
                learn(model, *part[0])
            model.step()
        if scheduled:
            model.end_epoch(1.0)
    model.merge()
    model.check_replicas()
    return parameters_and_averages(model)


WAYS: list[Options] = [
    {"sync_every": 4},
    {"sync_every": 4, "node_size": 2},
    {"sync_every": schedule(), "node_size": 2},
    {"sync_every": schedule(), "node_size": 1},
]


@pytest.mark.parametrize(
    "options", WAYS, ids=["steps", "steps on nodes", "nodes of 2", "nodes of 1"]
)
@pytest.mark.parametrize("name", ["mlp", pytest.param("batch_norm", marks=pytest.mark.slow)])
def test_devices_and_engine_agree(shm: RankPool, name: str, options: Options) -> None:
    answers = {}
    for key in ("cpu", "cpu:0", "engine"):
        how = {"compute": "engine"} if key == "engine" else {"device": key}
        answers[key] = shm.run(train_between_merges, name, {**options, **how}, 4, size=4, limit=60)
    for rank in range(4):
        expected = answers["cpu"][rank]
        assert distance(answers["cpu:0"][rank], expected) < 1e-4
        assert distance(answers["engine"][rank], expected) < 1e-3


def test_over_nccl_as_over_memory(nccl: RankPool, shm: RankPool) -> None:
    options = {**WAYS[2], "device": "cpu:0"}
    answers = [
        pool.run(train_between_merges, "batch_norm", options, 4, size=4, limit=60)
        for pool in (nccl, shm)
    ]
    for ours, other in zip(*answers, strict=True):
        assert distance(ours, other) < 1e-5


def join_between_merges(comm: Any) -> tuple[str, int]:
    model = wrap_merging(comm, sync_every=3)
    with model.join():
        for step in range(2 + 3 * comm.rank):
            learn(model, *NETWORKS["mlp"].batch(step + 100 * comm.rank, 5))
            model.step()
    return model.check_replicas(), model.unmerged_steps


def test_ranks_run_out_of_data(shm: RankPool) -> None:
    answers = shm.run(join_between_merges, size=3)
    assert answers == [(answers[0][0], 0)] * 3


def load(comm: Any, path: str) -> list[bool]:
    model = wrap_merging(comm, sync_every=4)
    first = model.check_replicas()
    model.save(path)
    kept = model.state_dict()
    found = []
    for way in (lambda: model.load(path), lambda: model.load_state_dict(kept)):
        for step in range(2):
            learn(model, *NETWORKS["mlp"].batch(step + comm.rank, 5))
            model.step()
        error = report(model.check_replicas)
        found.append(error[0] == ReplicaMismatch.__name__ and "call merge() before" in error[1])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.save(path + ".other")
        found.append(len(told) == (comm.rank == 0) and all("2 steps" in str(w) for w in told))
        way()
        found.append(model.unmerged_steps == 0 and model.check_replicas() == first)
    model.merge()  # of nothing: what was loaded is the prior of all
    return [*found, model.check_replicas() == first]


def test_loading_begins_anew(shm: RankPool, tmp_path: Path) -> None:
    assert shm.run(load, str(tmp_path / "model"), size=2) == [[True] * 7] * 2


def widen(comm: Any, device: str) -> tuple[dict[str, int], bool, str]:
    """A step after which all ranks know a parameter four times less: merged, less than nothing."""
    model = wrap_merging(comm, device=device)
    learn(model, *NETWORKS["mlp"].batch(comm.rank, 4))
    deltas = model._local.replica.parameters.deltas if device != "cpu" else model.compute.bucket
    deltas[:] = 0
    deltas[len(deltas) // 2 + 7] = 100.0  # as far as the cap lets it
    model.step()
    variances = np.concatenate([vs[1] for vs in parameters(model).values()])
    return model.get_partial_merge_counter(), bool((variances > 0).all()), model.check_replicas()


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_merges_that_are_taken_in_part_are_counted(shm: RankPool, device: str) -> None:
    answers = shm.run(widen, device, size=3)
    assert answers == [answers[0]] * 3
    assert answers[0][:2] == ({"Linear(12,32)": 1, "Linear(32,24)": 0, "Linear(24,5)": 0}, True)


# --- what is refused -------------------------------------------------------------------------


def refuse_between_merges(comm: Any, options: Options) -> tuple[list[Report], bool, bool]:
    model = wrap_merging(comm, **options)
    scheduled = isinstance(options["sync_every"], SyncSchedule)
    if scheduled:
        model.begin_epoch(4)
    errors = []
    for step in range(4):
        learn(model, *NETWORKS["mlp"].batch(step + 10 * comm.rank, 6))
        if (comm.rank, step) == (1, 1):
            layer = model.model._cpp_backend.layers[2]
            if "device" in options:
                model._local.replica.parameters.deltas[7] = float("inf")
            else:
                bad = [float("nan")] + [0.0] * (layer.num_weights - 1)
                set_delta_variances(model, layer, bad)
        errors.append(report_if_any(model.step))
    if scheduled:
        model.end_epoch(1.0)
    same = model.check_replicas()
    model.merge()
    finite = all(np.isfinite(v).all() for vs in parameters(model).values() for v in vs)
    return errors, finite, model.check_replicas() == same


@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 4},
        {"sync_every": 4, "device": "cpu:0"},
        {"sync_every": schedule(), "node_size": 1},
    ],
    ids=["steps", "device", "schedule"],
)
def test_all_ranks_learn_of_deltas_that_are_not_finite(shm: RankPool, options: Options) -> None:
    for rank, (errors, finite, same) in enumerate(shm.run(refuse_between_merges, options, size=3)):
        assert errors[:3] == [NO_ERROR] * 3
        kind, text, ranks = errors[3]
        assert (kind, ranks) == (NotFiniteError.__name__, (1,))
        assert "steps since the last merge were refused" in text
        assert ("(here: layer 2 (Linear(32,24)))" in text) == (
            rank == 1 and "device" not in options
        )
        assert finite
        assert same


def fail_between_merges(comm: Any, options: Options) -> tuple[Report, float]:
    model = wrap_merging(comm, **options)
    scheduled = isinstance(options["sync_every"], SyncSchedule)
    if scheduled:
        model.begin_epoch(40)
    start = time.monotonic()
    for step in range(40):
        if (comm.rank, step) == (2, 5):
            sys.modules["__main__"].kept = model  # type: ignore[attr-defined]  # lives on
            return report(model.step), 0.0  # without a backward
        learn(model, *NETWORKS["mlp"].batch(step, 6))
        if (error := report_if_any(model.step)) != NO_ERROR:
            return error, time.monotonic() - start
    return NO_ERROR, 0.0


@pytest.mark.parametrize(
    "options",
    [{"sync_every": 4}, *({"sync_every": schedule(), "node_size": n} for n in (1, 2, 4))],
    ids=["steps", "nodes of 1", "nodes of 2", "nodes of 4"],
)
def test_a_rank_that_fails_keeps_nobody_waiting(shm: RankPool, options: Options) -> None:
    answers = shm.run(fail_between_merges, options, size=4, fresh=True)
    assert answers[2][0][0] == "RuntimeError"
    for rank in (0, 1, 3):
        (kind, _, _), seconds = answers[rank]
        assert kind == "PeerLost"
        assert seconds < 10  # the communicators wait for 20


def miss_one(comm: Any) -> Report:
    """Rank 3 does not come to the merge of its node, 2 comes late; 0 waits for 1, 1 for 2."""
    model = wrap_merging(comm, node_size=2)
    exchange: Any = model._ranks.exchange
    merge, levels = exchange._merge_node, exchange._levels_of_world

    def late() -> None:
        for level in (comm, levels.node, levels.inter_node):
            level.timeout = 2.0
        time.sleep({2: 0.5, 3: 8.0}.get(comm.rank, 0.0))
        merge()

    exchange._merge_node = late
    learn(model, *NETWORKS["mlp"].batch(comm.rank, 5))
    return report(model.step)


def test_the_rank_that_all_wait_for_is_blamed(shm: RankPool) -> None:
    answers = shm.run(miss_one, size=4, fresh=True)
    for kind, text, ranks in answers[:3]:
        assert kind in ("Timeout", "PeerLost")
        assert ranks == (3,), text


def leave_early(comm: Any) -> tuple[bool, bool]:
    """Close while a node's change is under way."""
    model = wrap_merging(comm, sync_every=schedule(), node_size=1)
    with model:
        model.begin_epoch(9)
        learn(model, *NETWORKS["mlp"].batch(comm.rank, 6))
        model.step()
        under_way = model._ranks.exchange._sender is not None
    comm.barrier()
    again = wrap_merging(comm, sync_every=schedule(), node_size=1)
    again.begin_epoch(1)
    learn(again, *NETWORKS["mlp"].batch(comm.rank, 6))
    again.step()
    return under_way, bool(again.check_replicas())


def test_a_model_may_be_closed_while_a_change_is_under_way(shm: RankPool, gloo: RankPool) -> None:
    for pool in (shm, gloo):
        assert pool.run(leave_early, size=2) == [(True, True)] * 2


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"reduction": "max"}, ValueError, 'reduction must be "mean", "sum" or "precision"'),
        ({"reduction": "sum", "sync_every": 2}, ValueError, 'are for "precision"'),
        ({"sync_every": schedule()}, ValueError, "reduction='mean'"),
        ({"reduction": "precision", "sync_every": 0}, ValueError, "sync_every must be at least 1"),
        ({"reduction": "precision", "sync_every": "4"}, TypeError, "sync_every must be an integer"),
        ({"reduction": "precision", "node_size": 2}, ValueError, "1 ranks do not make equal nodes"),
        ({"node_size": 2}, ValueError, "sync_every and node_size are for"),
        ({"merge": "bayes"}, ValueError, "merge is for reduction=\"precision\", got 'bayes'"),
        ({"reduction": "precision", "merge": "mean"}, ValueError, "got 'mean'"),
    ],
)
def test_wrong_options(options: Options, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DDPSequential(fresh("mlp"), communicator=SingleCommunicator(), **options)


def test_wrong_calls() -> None:
    model = accelerate(fresh("mlp"))
    for call in (
        model.merge,
        model.get_partial_merge_counter,
        model.get_merge_agreement,
        lambda: list(model.local_batches(range(3), 1)),
        lambda: model.begin_epoch(3),
    ):
        with pytest.raises(RuntimeError, match="needs DDPSequential"):
            call()
    assert model.unmerged_steps == 0


def test_a_schedule_needs_epochs() -> None:
    def ready() -> DDPSequential:
        model = wrap_merging(SingleCommunicator(), sync_every=schedule())
        learn(model, *NETWORKS["mlp"].batch(0, 4))
        return model

    with pytest.raises(RuntimeError, match="needs begin_epoch"):
        ready().step()
    model = ready()
    model.begin_epoch(1)
    model.step()
    learn(model, *NETWORKS["mlp"].batch(0, 4))
    with pytest.raises(RuntimeError, match="batch number 1 of this epoch, of 1"):
        model.step()
    model = ready()
    model.begin_epoch(3)
    with pytest.raises(RuntimeError, match="needs an end_epoch"):
        model.begin_epoch(3)
    with pytest.raises(TypeError, match="batches must be an integer"):
        ready().begin_epoch(2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss must be finite"):
        ready().end_epoch(float("nan"))
    model = ready()
    model.begin_epoch(1)
    joining = model.join()
    joining.__enter__()
    with pytest.raises(RuntimeError, match=r"join\(\) is not for a schedule"):
        joining.__exit__(None, None, None)


def wrap_with_other_merges(comm: Any) -> list[Report]:
    rules: list[Any] = ["agreement", "bayes"]
    return [
        report(lambda: wrap_merging(comm, sync_every=2 + comm.rank)),
        report(lambda: wrap_merging(comm, merge=rules[comm.rank])),
    ]


def test_ranks_must_agree_on_the_scheme(shm: RankPool) -> None:
    for scheme, rule in shm.run(wrap_with_other_merges, size=2):
        assert scheme[0] == rule[0] == "ReplicaMismatch"
        assert "the option sync_every of rank 1: 3" in scheme[1]
        assert "the option merge of rank 1: bayes" in rule[1]
