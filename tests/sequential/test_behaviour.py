"""What DDPSequential does beside learning: refusing, accumulating, joining, saving, telling."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_pool import RankPool

from sequential.networks import NETWORKS, distance, fresh, learn, parameters
from tagi_ddp import (
    CommunicatorError,
    DDPConfig,
    DDPSequential,
    NotFiniteError,
    PeerLost,
    ReplicaMismatch,
)

Report = tuple[str, str, tuple[int, ...]]


def report(call: Callable[[], Any]) -> Report:
    """Return the type, text and ranks of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", ())
    raise AssertionError("no error")


def wrap(comm: Any, name: str = "mlp", **options: Any) -> DDPSequential:
    return DDPSequential(fresh(name), communicator=comm, **options)


# --- deltas that are not finite -----------------------------------------------------------------


def refuse(comm: Any, value: float, culprit: int) -> tuple[Report, bool, bool]:
    model = wrap(comm, average=False)
    x, y = NETWORKS["mlp"].batch(comm.rank, 8)
    learn(model, x, y)
    model.step()
    before = model.check_replicas()
    learn(model, x, y)
    if comm.rank == culprit:
        layer = model.model._cpp_backend.layers[2]
        layer.delta_var_w = [value] + [0.0] * (layer.num_weights - 1)
    error = report(model.step)
    unchanged = model.check_replicas() == before
    learn(model, x, y)
    model.step()
    return error, unchanged, model.check_replicas() != before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("size", "culprit"), [(1, 0), (2, 1), (3, 0)])
def test_deltas_that_are_not_finite(shm: RankPool, value: float, size: int, culprit: int) -> None:
    for rank, (error, unchanged, goes_on) in enumerate(shm.run(refuse, value, culprit, size=size)):
        kind, text, ranks = error
        assert (kind, ranks) == (NotFiniteError.__name__, (culprit,))
        assert ("layer 2 (Linear(32,24))" in text) == (rank == culprit)
        assert unchanged
        assert goes_on


# --- errors of one rank -------------------------------------------------------------------------


def early_step(model: DDPSequential) -> None:
    model.step()


def early_backward(model: DDPSequential) -> None:
    model.backward()


def wrong_size(model: DDPSequential) -> None:
    model.forward(np.zeros(13, np.float32))


def text_input(model: DDPSequential) -> None:
    model.forward(["a", "b"])


def wrong_variance(model: DDPSequential) -> None:
    model.forward(np.zeros(12), np.zeros(11))


def step_in_no_sync(model: DDPSequential) -> None:
    with model.no_sync():
        learn(model, *NETWORKS["mlp"].batch(0, 4))
        model.step()


def missing_file(model: DDPSequential) -> None:
    model.load("/nonexistent/weights.bin")


WRONG = {
    early_step: ("RuntimeError", "step() needs a backward()"),
    early_backward: ("RuntimeError", "backward() needs a forward()"),
    wrong_size: ("ValueError", "mu_x has 13 elements, no multiple of the network's input size, 12"),
    text_input: ("TypeError", "mu_x must be an array of numbers, got a list"),
    wrong_variance: ("ValueError", "var_x has 11 elements, mu_x 12"),
    step_in_no_sync: ("RuntimeError", "inside no_sync()"),
    missing_file: ("FileNotFoundError", "/nonexistent/weights.bin"),
}


def fail_alone(comm: Any, wrong: Callable[[DDPSequential], None]) -> Report:
    model = wrap(comm)
    if comm.rank == 0:
        return report(lambda: wrong(model))
    return report(model.check_replicas)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_error_of_one_rank_reaches_all(
    shm: RankPool, wrong: Callable[[DDPSequential], None]
) -> None:
    kind, text = WRONG[wrong]
    own, *others = shm.run(fail_alone, wrong, size=3, fresh=True)
    assert own[0] == kind
    assert text in own[1]
    for other in others:
        assert other[0] == PeerLost.__name__
        assert other[2] == (0,)
        assert f"{kind}: " in other[1]


def wrong_sequence(comm: Any) -> Report:
    model = wrap(comm, "lstm")
    return report(lambda: model.forward(np.zeros(2 * 4 - 2, np.float32)))


def test_wrong_length_of_a_sequence(shm: RankPool) -> None:
    (kind, text, _), *_ = shm.run(wrong_sequence, size=1, fresh=True)
    assert kind == "ValueError"
    assert "mu_x with 6 elements" in text


def use_after_close(comm: Any) -> list[Report]:
    model = wrap(comm)
    with model:
        pass
    x = np.zeros(12, np.float32)
    calls = [lambda: model(x), model.backward, model.step, model.check_replicas]
    return [report(call) for call in calls]


def test_use_after_close(shm: RankPool) -> None:
    for errors in shm.run(use_after_close, size=2, fresh=True):
        for kind, text, _ in errors:
            assert kind == CommunicatorError.__name__
            assert "closed" in text


def error_in_block(comm: Any) -> Report:
    def block() -> None:
        with wrap(comm) as model:
            if comm.rank == 1:
                raise KeyError("labels")
            model.barrier()

    return report(block)


def test_error_in_a_with_block(shm: RankPool) -> None:
    first, second = shm.run(error_in_block, size=2, fresh=True)
    assert second[0] == "KeyError"
    assert first[0] == PeerLost.__name__
    assert "KeyError: 'labels'" in first[1]


# --- models that differ -------------------------------------------------------------------------


def other_model(comm: Any, name: str, **options: Any) -> Report:
    model = fresh(name if comm.rank == 1 else "mlp")
    return report(lambda: DDPSequential(model, communicator=comm, **options))


@pytest.mark.parametrize("name", ["cnn", "layer_norm"])
def test_models_that_differ(shm: RankPool, name: str) -> None:
    for kind, text, _ in shm.run(other_model, name, size=3, fresh=True):
        assert kind == ReplicaMismatch.__name__
        assert "layer 0 (" in text
        assert "of rank 1" in text
        assert "Linear(12,32)" in text


def other_average(comm: Any) -> Report:
    return report(lambda: wrap(comm, average=comm.rank == 0))


def test_reductions_that_differ(shm: RankPool) -> None:
    for kind, text, _ in shm.run(other_average, size=2, fresh=True):
        assert kind == ReplicaMismatch.__name__
        assert "average" in text


def keeps_its_parameters(comm: Any, name: str) -> bool:
    import pytagi

    pytagi.manual_seed(100 + comm.rank)
    network = NETWORKS[name].build()
    x, _ = NETWORKS[name].batch(0, 3)
    network.forward(x.ravel())
    own = parameters(network)
    model = DDPSequential(network, communicator=comm)
    model.check_replicas()
    return distance(own, parameters(model)) == 0


@pytest.mark.parametrize("name", ["mlp", "autoencoder", "batch_norm"])
def test_rank_0_wins(shm: RankPool, name: str) -> None:
    assert shm.run(keeps_its_parameters, name, size=3) == [True, False, False]


def tamper(comm: Any) -> Report:
    model = wrap(comm, "cnn")
    assert model.check_replicas() == model.check_replicas()
    if comm.rank == 1:
        bias = model.model._cpp_backend.layers[3]
        bias.mu_b = list(np.nextafter(np.float32(bias.mu_b), np.float32(9)))
    return report(model.check_replicas)


def test_check_replicas_finds_a_single_bit(shm: RankPool) -> None:
    for kind, text, _ in shm.run(tamper, size=2):
        assert kind == ReplicaMismatch.__name__
        assert "layer 3 (Conv2d(" in text
        assert "of rank 1" in text


# --- accumulating, joining, growing -------------------------------------------------------------


def accumulate(comm: Any, name: str, splits: list[int]) -> tuple[float, float]:
    """Train with micro-batches, and on the same batches whole; return how far both are apart."""
    results = []
    for parts in (splits, [sum(splits)]):
        model = wrap(comm, name, average=False)
        start = parameters(model)
        for step in range(3):
            x, y = NETWORKS[name].batch(10 * comm.rank + step, sum(splits))
            with model.no_sync():
                for end, part in zip(np.cumsum(parts), parts, strict=True):
                    learn(model, x[end - part : end], y[end - part : end])
            model.step()
        results.append((start, parameters(model)))
    (start, micro), (other_start, whole) = results
    assert distance(start, other_start) == 0
    return distance(micro, whole), distance(start, whole)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
@pytest.mark.parametrize("splits", [[130, 140], [5, 6, 7]], ids=str)
def test_no_sync_sums_micro_batches(shm: RankPool, name: str, splits: list[int]) -> None:
    for apart, moved in shm.run(accumulate, name, splits, size=2):
        assert apart < 1e-5
        assert moved > 1e-3


def last_micro_batch_outside(comm: Any) -> bool:
    states = []
    for inside in (True, False):
        model = wrap(comm, average=False)
        batches = [NETWORKS["mlp"].batch(comm.rank + seed, 9) for seed in (0, 10)]
        with model.no_sync():
            learn(model, *batches[0])
            if inside:
                learn(model, *batches[1])
        if not inside:
            learn(model, *batches[1])
        model.step()
        learn(model, *batches[0])  # without no_sync nothing may be left over
        model.step()
        states.append(model.check_replicas())
    return states[0] == states[1]


def test_last_micro_batch_may_be_outside(shm: RankPool) -> None:
    assert shm.run(last_micro_batch_outside, size=2) == [True, True]


def join(comm: Any, batches: list[int], average: bool) -> tuple[str, int]:
    model = wrap(comm, "batch_norm", average=average)
    x, y = NETWORKS["batch_norm"].batch(comm.rank, 12)
    steps = 0
    with model.join():
        for _ in range(batches[comm.rank]):
            learn(model, x, y)
            model.step()
            steps += 1
    digest = model.check_replicas()  # the group is in step again
    learn(model, x, y)
    model.step()
    model.check_replicas()
    return digest, steps


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batches", [[3, 1], [0, 2], [0, 0], [2, 4, 1]], ids=str)
def test_join(shm: RankPool, batches: list[int], average: bool) -> None:
    answers = shm.run(join, batches, average, size=len(batches))
    assert [steps for _, steps in answers] == batches
    assert len({digest for digest, _ in answers}) == 1


def join_alone(comm: Any) -> float:
    """One rank goes on alone: the result is that of its own data on a single process."""
    model = wrap(comm, average=False)
    start = model.state_dict()
    data = [NETWORKS["mlp"].batch(seed, 8) for seed in range(4)]
    with model.join():
        if comm.rank == 0:
            for x, y in data:
                learn(model, x, y)
                model.step()
    alone = fresh("mlp")
    alone.load_state_dict(start)
    for x, y in data:
        learn(alone, x, y)
        alone.step()
    return distance(parameters(model), parameters(alone))


def test_joined_ranks_contribute_nothing(shm: RankPool) -> None:
    assert max(shm.run(join_alone, size=3)) < 1e-6


def empty_shares(comm: Any, shares: list[list[int]]) -> tuple[str, bool]:
    """Each step's batches are given per rank; compare with all samples on one process."""
    model = wrap(comm, average=False)
    start = model.state_dict()
    alone = fresh("mlp")
    alone.load_state_dict(start)
    for step, counts in enumerate(shares):
        x, y = NETWORKS["mlp"].batch(step, sum(counts))
        begin = sum(counts[: comm.rank])
        part = slice(begin, begin + counts[comm.rank])
        learn(model, x[part], y[part])
        model.step()
        learn(alone, x, y)
        alone.step()
    return model.check_replicas(), distance(parameters(model), parameters(alone)) < 1e-5


def test_empty_shares(shm: RankPool) -> None:
    shares = [[9, 8, 7], [5, 0, 4], [0, 3, 0], [0, 0, 6], [2, 2, 2]]
    answers = shm.run(empty_shares, shares, size=3)
    assert len(set(answers)) == 1
    assert answers[0][1]


def empty_micro_batches(comm: Any) -> bool:
    states = []
    for empty in (True, False):
        model = wrap(comm, average=False)
        with model.no_sync():
            for seed, size in ((0, 4), (1, 0), (2, 5), (3, 0)):
                if size or empty:
                    learn(model, *NETWORKS["mlp"].batch(seed, size))
        model.step()
        states.append(model.check_replicas())
    return states[0] == states[1]


def test_empty_micro_batches(shm: RankPool) -> None:
    assert shm.run(empty_micro_batches, size=2) == [True, True]


def grow(comm: Any) -> bool:
    """A batch greater than the first: the engine by itself writes beyond its buffers."""
    model = wrap(comm, "cnn")
    learn(model, *NETWORKS["cnn"].batch(0, 2))
    model.step()
    x, _ = NETWORKS["cnn"].batch(1, 300)
    parts = [model(x[i : i + 2])[0] for i in range(0, 300, 2)]
    whole = model(x)[0]
    return bool(np.allclose(np.concatenate(parts), whole, rtol=1e-5, atol=1e-6))


def test_growing_batch(shm: RankPool) -> None:
    assert shm.run(grow, size=1) == [True]


# --- batch normalization ------------------------------------------------------------------------


def running_means(comm: Any, shares: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the running mean after a step, and the one of this rank's share."""
    model = wrap(comm, "batch_norm")
    learn(model, *NETWORKS["batch_norm"].batch(comm.rank, shares[comm.rank]))
    own = np.array(model.model.get_norm_mean_var()["BatchNorm2d()_1"][0])
    model.step()
    return np.array(model.model.get_norm_mean_var()["BatchNorm2d()_1"][0]), own


def test_running_statistics_are_the_weighted_mean(shm: RankPool) -> None:
    shares = [8, 24, 4]
    answers = shm.run(running_means, shares, size=3)
    expected = sum(share * own for share, (_, own) in zip(shares, answers, strict=True)) / 36
    assert not np.allclose(answers[0][1], answers[1][1], rtol=1e-3)
    for merged, _ in answers:
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-7)


# --- what passes through ------------------------------------------------------------------------


def save_and_load(comm: Any, name: str, folder: str) -> list[str]:
    path = str(Path(folder) / "model.bin")
    model = wrap(comm, name)
    learn(model, *NETWORKS[name].batch(comm.rank, 8))
    model.step()
    state = model.state_dict()
    model.save(path)
    model.barrier()
    digests = [model.check_replicas()]
    learn(model, *NETWORKS[name].batch(comm.rank, 8))
    model.step()
    digests.append(model.check_replicas())
    if comm.rank == 1:
        path = "only rank 0 reads"
    model.load(path)
    digests.append(model.check_replicas())
    learn(model, *NETWORKS[name].batch(comm.rank, 8))
    model.step()
    model.load_state_dict(state if comm.rank == 0 else {})
    return [*digests, str(state == model.state_dict())]


@pytest.mark.parametrize("name", ["mlp", "cnn", "autoencoder"])
def test_save_and_load(shm: RankPool, name: str, tmp_path: Path) -> None:
    for saved, changed, loaded, same in shm.run(save_and_load, name, str(tmp_path), size=2):
        assert saved == loaded != changed
        assert same == "True"


def collapse(comm: Any) -> dict[str, int]:
    model = wrap(comm, "resnet", average=False)
    x, y = NETWORKS["resnet"].batch(comm.rank, 4)
    learn(model, x, y)
    inner = model.model._cpp_backend.layers[2].main_block.layers[0]
    inner.delta_var_w = [-1e9] * 7 + [0.0] * (inner.num_weights - 7)
    inner.var_w = [1e-8] * inner.num_weights
    model._delta_samples = 1  # a cap factor of 0.1 lets the variance fall below 0
    model.step()
    return model.get_neg_var_w_counter()


def test_negative_variances_are_counted(shm: RankPool) -> None:
    for counts in shm.run(collapse, size=1):
        assert counts["Conv2d(4,6,8,8,3)"] == 7
        assert counts["Linear(96,5)"] == 0


def interface(comm: Any) -> None:
    model = wrap(comm)
    x, _ = NETWORKS["mlp"].batch(0, 3)
    mean, variance = model(x)
    assert mean.shape == variance.shape == (15,)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_outputs(), model(x), strict=True))
    noisy = model.forward(x, np.full_like(x, 0.1))[1]
    assert (noisy > variance).all()
    model.output_to_host()
    assert model.get_device_with_index() == "cpu:0"
    assert model.output_z_buffer.block_size == 3
    model.output_z_buffer = model.output_z_buffer
    model.input_delta_z_buffer = model.input_delta_z_buffer
    model.eval()
    assert not model.model._cpp_backend.layers[0].training
    model.train()
    assert model.model._cpp_backend.layers[0].training
    model.barrier()


def test_interface(shm: RankPool) -> None:
    shm.run(interface, size=2)


def threads(comm: Any, chosen: int | None) -> tuple[int, int]:
    network = fresh("resnet")
    if chosen:
        network.set_threads(chosen)
    DDPSequential(network, communicator=comm)
    inner = network._cpp_backend.layers[2].main_block.layers[0]
    return network._cpp_backend.layers[0].num_threads, inner.num_threads


@pytest.mark.parametrize("chosen", [None, 1, 3, 4])
def test_threads(shm: RankPool, chosen: int | None) -> None:
    import os

    expected = chosen or max(1, len(os.sched_getaffinity(0)) // 2)
    assert shm.run(threads, chosen, size=2) == [(expected, expected)] * 2


# --- one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "shm", "mpi", "gloo"])
def test_world_of_one(backend: str) -> None:
    with DDPSequential(fresh("mlp"), DDPConfig([], backend)) as model:
        start = parameters(model)
        learn(model, *NETWORKS["mlp"].batch(0, 8))
        model.step()
        assert distance(start, parameters(model)) > 1e-4
        assert model.communicator.backend == "single"
        assert len(model.check_replicas()) == 64


def test_neither_config_nor_communicator() -> None:
    with pytest.raises(TypeError, match="config or communicator"):
        DDPSequential(fresh("mlp"))


# --- the engine's public interface --------------------------------------------------------------


def through_public_interface(comm: Any, name: str, monkeypatched: str) -> tuple[str, str]:
    import os

    os.environ["TAGI_DDP_ENGINE_ACCESS"] = monkeypatched
    try:
        model = wrap(comm, name, average=False)
    finally:
        del os.environ["TAGI_DDP_ENGINE_ACCESS"]
    for step in range(3):
        with model.no_sync():
            learn(model, *NETWORKS[name].batch(20 * step + comm.rank, 6))
            learn(model, *NETWORKS[name].batch(20 * step + comm.rank + 10, 7))
        model.step()
    return type(model._replica).__name__, repr(parameters(model))


@pytest.mark.parametrize("name", ["mlp", "resnet", "lstm", "layer_norm"])
def test_both_ways_to_the_engine_give_the_same(shm: RankPool, name: str) -> None:
    memory = shm.run(through_public_interface, name, "memory", size=2)
    public = shm.run(through_public_interface, name, "public", size=2)
    assert [kind for kind, _ in memory + public] == ["InPlace"] * 2 + ["Copied"] * 2
    assert len({state for _, state in memory + public}) == 1


def test_public_interface_cannot_write_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "public")
    with pytest.raises(RuntimeError, match=r"layer 1 \(BatchNorm2d\(\)\).*running statistics"):
        DDPSequential(fresh("batch_norm"), DDPConfig([], "auto"))


def test_unknown_layout_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from tagi_ddp.engine import adapter, pointers

    def unknown() -> None:
        raise pointers.LayoutError("mu_w is elsewhere")

    monkeypatch.setattr(adapter, "verify_layout", unknown)
    with pytest.warns(RuntimeWarning, match="mu_w is elsewhere") as record:
        model = DDPSequential(fresh("mlp"), DDPConfig([], "auto"))
    assert len(record) == 1
    assert isinstance(model._replica, adapter.Copied)
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "memory")
    with pytest.raises(pointers.LayoutError), warnings.catch_warnings():
        DDPSequential(fresh("mlp"), DDPConfig([], "auto"))
