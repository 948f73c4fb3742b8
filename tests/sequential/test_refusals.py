"""Calls that DDPSequential refuses, and the errors that the other ranks get."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, after_series, after_words, distance, fresh, learn, parameters
from support.rank_pool import RankPool
from support.reports import (
    NO_ERROR,
    Report,
    report,
    report_if_any,
    set_delta_variances,
    wrap,
)

from tagi_ddp import (
    CommunicatorError,
    DDPConfig,
    DDPSequential,
    NotFiniteError,
    PeerLost,
    ReplicaMismatch,
)


def refuse_a_step(comm: Any, value: float, culprit: int, compute: str) -> tuple[Report, bool, bool]:
    model = wrap(comm, average=False, compute=compute)
    x, y = NETWORKS["mlp"].batch(comm.rank, 8)
    learn(model, x, y)
    model.step()
    before = model.check_replicas()
    learn(model, x, y)
    if comm.rank == culprit:
        layer = model.model._cpp_backend.layers[2]
        set_delta_variances(model, layer, [value] + [0.0] * (layer.num_weights - 1))
    error = report(model.step)
    unchanged = model.check_replicas() == before
    learn(model, x, y)
    model.step()
    return error, unchanged, model.check_replicas() != before


@pytest.mark.parametrize("compute", ["engine", "torch"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("size", "culprit"), [(1, 0), (2, 1), (3, 0)])
def test_deltas_that_are_not_finite(
    shm: RankPool, value: float, size: int, culprit: int, compute: str
) -> None:
    answers = shm.run(refuse_a_step, value, culprit, compute, size=size)
    for rank, (error, unchanged, goes_on) in enumerate(answers):
        kind, text, ranks = error
        assert (kind, ranks) == (NotFiniteError.__name__, (culprit,))
        assert ("layer 2 (Linear(32,24))" in text) == (rank == culprit)
        assert unchanged
        assert goes_on


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


WRONG = {
    early_step: ("RuntimeError", "step() needs a backward()"),
    early_backward: ("RuntimeError", "backward() needs a forward()"),
    wrong_size: ("ValueError", "mu_x has 13 elements, no multiple of the network's input size, 12"),
    text_input: ("TypeError", "mu_x must be an array of numbers, got a list"),
    wrong_variance: ("ValueError", "var_x has 11 elements, mu_x 12"),
    step_in_no_sync: ("RuntimeError", "inside no_sync()"),
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


def refused_while_others_have_left(comm: Any) -> tuple[Report, str]:
    model = wrap(comm, average=False)

    def steps() -> None:
        with model.join():
            for step in range(2 if comm.rank else 5):
                learn(model, *NETWORKS["mlp"].batch(step, 8))
                if step == 3:
                    layer = model.model._cpp_backend.layers[2]
                    set_delta_variances(model, layer, [np.nan] * layer.num_weights)
                with suppress(NotFiniteError):
                    model.step()

    error = report_if_any(steps)
    if error != NO_ERROR:
        with model.join():
            pass
    return error, model.check_replicas()


def test_who_has_left_may_follow_again(shm: RankPool) -> None:
    """Rank 0 goes on after the step that was refused."""
    (own, state), *others = shm.run(refused_while_others_have_left, size=3)
    assert own == NO_ERROR
    for error, other_state in others:
        assert (error[0], error[2], other_state) == (NotFiniteError.__name__, (0,), state)


def wrong_reduction(comm: Any, wrong: str) -> Report:
    return report(lambda: wrap(comm, reduction=wrong if comm.rank else "sum"))


@pytest.mark.parametrize("wrong", ["median", ""])
def test_a_wrong_argument_of_one_rank_is_told(shm: RankPool, wrong: str) -> None:
    first, second = shm.run(wrong_reduction, wrong, size=2, fresh=True)
    assert second[0] == "ValueError"
    assert first[0] == PeerLost.__name__
    assert "rank 1 gave up: ValueError: reduction" in first[1]


def wrong_index(comm: Any, compute: str) -> tuple[Report, bool]:
    from pytagi.nn import Embedding, Linear, Sequential

    net = Sequential(
        Embedding(4, 2, input_size=3), *after_words(2, 3), Linear(after_series(2, 3), 1)
    )
    model = DDPSequential(net, communicator=comm, average=False, compute=compute)
    x, y = np.ones((5, 3), np.float32) * comm.rank, np.ones((5, 1), np.float32)
    for _ in range(3):  # the later ones are one call each
        model.learn(x, y, 1.0)
    before = parameters(model)
    error = report(lambda: model.learn(x + 9 * comm.rank, y, 1.0))
    return error, distance(parameters(model), before) == 0


@pytest.mark.parametrize("compute", ["native", "torch"])
def test_an_index_that_a_layer_refuses_is_told(shm: RankPool, compute: str) -> None:
    (first, kept), (second, also) = shm.run(wrong_index, compute, size=2, fresh=True)
    assert kept
    assert also
    assert first[0] == PeerLost.__name__
    assert f"rank 1 gave up: {second[0]}: " in first[1]


@pytest.mark.parametrize("options", [{"average": False}, {"reduction": "precision"}], ids=str)
def test_a_world_of_one_goes_on_after_an_error(options: dict[str, Any], tmp_path: Path) -> None:
    model = DDPSequential(fresh("mlp"), DDPConfig([], "auto", 0, 1), **options)
    x, y = NETWORKS["mlp"].batch(0, 8)
    model.learn(x, y, 0.1)
    model.save(str(tmp_path / "state"))
    before = model.check_replicas()
    with pytest.raises(ValueError, match="mu_x has"):
        model.learn(x[:, 1:], y, 0.1)
    model.learn(x, y, 0.1)
    model.load(str(tmp_path / "state"))
    assert model.check_replicas() == before


def wrong_sequence(comm: Any) -> Report:
    model = wrap(comm, "lstm")
    return report(lambda: model.forward(np.zeros(2 * 4 - 2, np.float32)))


def test_wrong_length_of_a_sequence(shm: RankPool) -> None:
    (kind, text, _), *_ = shm.run(wrong_sequence, size=1, fresh=True)
    assert kind == "ValueError"
    assert "mu_x has 6 elements" in text


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
        assert "option reduction" in text


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
