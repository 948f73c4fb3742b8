"""Uses of pytagi's interface besides the four calls of a step, on every compute."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from pytagi.nn import Embedding, Linear, Sequential
from support.networks import NETWORKS, after_series, after_words, distance, fresh, learn, parameters
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential, OutputUpdater
from tagi_ddp.engine.dialect import dialect
from tagi_ddp.sequential import accelerate

COMPUTES = ("engine", "native", "torch")


def halves() -> list[Any]:
    """Return an encoder that ends in an activation, and a decoder."""
    import pytagi
    import pytagi.nn as nn

    pytagi.manual_seed(5)
    encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Sigmoid())
    return [encoder, nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6))]


def train_chained(encoder: Any, decoder: Any) -> None:
    import pytagi.nn as nn

    updater = nn.OutputUpdater("cpu")
    rng = np.random.default_rng(0)
    decoder.input_state_update = True
    for batch in (4, 4, 3):
        x = rng.standard_normal(batch * 6).astype(np.float32)
        encoder(x)
        decoder(encoder.output_z_buffer)
        noise = np.full(x.size, 0.3, np.float32)
        updater.update(decoder.output_z_buffer, x, noise, decoder.input_delta_z_buffer)
        decoder.backward()
        decoder.step()
        encoder.input_delta_z_buffer.copy_from(decoder.output_delta_z_buffer)
        encoder.backward()
        encoder.step()


@pytest.mark.parametrize("compute", COMPUTES)
def test_chained_networks(compute: Any) -> None:
    plain, ours = halves(), [accelerate(half, compute) for half in halves()]
    before = parameters(plain[0])
    train_chained(*plain)
    train_chained(*ours)
    assert distance(before, parameters(plain[0])) > 1e-3
    for one, other in zip(plain, ours, strict=True):
        assert distance(parameters(one), parameters(other)) < 1e-5


@pytest.mark.parametrize("compute", COMPUTES[1:])
def test_innovation_of_inputs_that_nobody_asked_for(compute: Any) -> None:
    model = accelerate(fresh("mlp"), compute)
    learn(model, *NETWORKS["mlp"].batch(0, 4))
    with pytest.raises(RuntimeError, match="set input_state_update"):
        _ = model.output_delta_z_buffer


@pytest.mark.parametrize("compute", COMPUTES)
def test_set_delta_z(compute: Any) -> None:
    ours, plain = accelerate(fresh("mlp"), compute), fresh("mlp")
    x, _ = NETWORKS["mlp"].batch(0, 4)
    rng = np.random.default_rng(0)
    mean, variance = rng.standard_normal((2, 4, 5)).astype(np.float32)
    for model in (ours, plain):
        model(x.ravel())
    with pytest.raises(ValueError, match="delta_var has 16 elements, not 20"):
        ours.set_delta_z(mean, variance[:, :4])
    before = ours.input_delta_z_buffer
    for rows in (3, 5):  # shown, as pytagi does, but nothing is computed from it
        given = np.resize(mean, 5 * rows)
        ours.set_delta_z(given, given)
        np.testing.assert_array_equal(ours.input_delta_z_buffer.delta_mu, given)
        with pytest.raises(ValueError, match=f"delta_mu has {5 * rows} elements, not 20"):
            ours.backward()
    ours(x.ravel())
    assert ours.input_delta_z_buffer is before
    # The engine's buffer has room for its widest layer, and needs it.
    room = np.zeros((2, 4 * 32), np.float32)
    room[:, :20] = mean.ravel(), -np.abs(variance.ravel())
    plain.set_delta_z(*room)
    ours.set_delta_z(mean, -np.abs(variance))
    np.testing.assert_array_equal(ours.input_delta_z_buffer.delta_mu[:20], mean.ravel())
    for model in (ours, plain):
        model.backward()
        model.step()
    assert distance(parameters(ours), parameters(plain)) < 1e-5


@pytest.mark.parametrize("compute", COMPUTES)
def test_lstm_states(compute: Any) -> None:
    """Those of before the first batch are empty; given back, they forget."""
    model = accelerate(fresh("lstm"), compute)
    empty = model.get_lstm_states(time_step=-1)
    assert all(not len(part) for parts in empty.values() for part in parts)
    model.set_lstm_states(empty)
    x, y = NETWORKS["lstm"].batch(0, 4)
    first = model(x)[0]
    model.set_lstm_states(
        {i: [np.ones_like(part) for part in parts] for i, parts in model.get_lstm_states().items()}
    )
    # Engines with sequences begin each sample from zeros.
    assert np.array_equal(model(x)[0], first) == dialect().sequences
    model.set_lstm_states(empty)
    np.testing.assert_array_equal(model(x)[0], first)
    learn(model, x, y)


def test_a_network_that_has_its_own_forward() -> None:
    import pytagi.nn as nn

    class Doubled(nn.Sequential):
        def forward(self, mu_x: Any, var_x: Any = None) -> Any:
            return super().forward(2 * mu_x, var_x)

    def network(kind: Any) -> Any:
        import pytagi

        pytagi.manual_seed(1)
        return kind(nn.Linear(3, 2))

    x = np.ones(3, np.float32)
    with pytest.warns(RuntimeWarning, match=r"Doubled has a forward\(\) of its own"):
        model = accelerate(network(Doubled))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = accelerate(network(Doubled), "engine")
    expected = network(nn.Sequential)(2 * x)
    for one in (model, asked):
        np.testing.assert_array_equal(one(x), expected)
    for compute in ("native", "torch"):
        with pytest.raises(ValueError, match=r"Doubled has a forward\(\) of its own"):
            accelerate(network(Doubled), compute)

    class Stepping(nn.Sequential):
        def step(self) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Stepping, whose own step\(\) nobody would call"):
        accelerate(network(Stepping))


def test_to_a_device_that_is_not_there() -> None:
    import pytagi

    if pytagi.cuda.is_available():
        pytest.skip("there is a GPU")
    model = fresh("mlp")
    with pytest.raises(RuntimeError, match="to move the network to, 'cuda:0': it stays on cpu"):
        model.to_device("cuda:0")
    learn(model, *NETWORKS["mlp"].batch(0, 4))


def one_sample_for_two_ranks(comm: Any, compute: Any) -> float:
    """Rank 1 has none, from the first batch on; both use pytagi's updater, or learn()."""
    models = [
        DDPSequential(fresh("mlp"), average=False, communicator=comm, compute=compute)
        for _ in range(2)
    ]
    alone = fresh("mlp")
    for step in range(3):
        x, y = NETWORKS["mlp"].batch(step, 1)
        learn(alone, x, y)
        alone.step()
        if comm.rank == 1:
            x, y = x[:0], y[:0]
        learn(models[0], x, y)
        models[0].step()
        models[1].learn(x, y, 0.25)
    assert models[0].check_replicas() == models[1].check_replicas()
    return distance(parameters(models[0]), parameters(alone))


@pytest.mark.parametrize("compute", ["engine", "native", "torch", "auto"])
def test_less_samples_than_ranks(shm: RankPool, compute: str) -> None:
    assert max(shm.run(one_sample_for_two_ranks, compute, size=2)) < 1e-5


def test_refused_inputs_have_no_innovation() -> None:
    """The innovation of the inputs before is gone with them, whatever their number was."""
    model = accelerate(
        Sequential(
            Embedding(4, 2, input_size=3), *after_words(2, 3), Linear(after_series(2, 3), 1)
        ),
        "native",
    )
    model.input_state_update = True
    for indices in (np.zeros((1, 3)), np.zeros((5, 3))):
        model(indices.astype(np.float32))
        update = np.ones(len(indices), np.float32)
        OutputUpdater(model).update(update, update)
        model.backward()
        assert model.get_input_states()[0].size == indices.size
        with pytest.raises(Exception, match="index 9"):
            model(np.full((40, 3), 9, np.float32))
        with pytest.raises(RuntimeError, match="set input_state_update"):
            model.get_input_states()
