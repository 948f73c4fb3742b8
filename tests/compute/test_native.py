"""The backend's own kernels: refusals, series, whole steps, and one batch here, one there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.networks import NETWORKS, SIGMA_V, distance, fresh, learn, parameters

from tagi_ddp import NotFiniteError, OutputUpdater
from tagi_ddp.compute import native
from tagi_ddp.sequential import accelerate

COMPUTES = ("engine", "native", "torch")


def test_refusals() -> None:
    import pytagi.nn as nn

    with pytest.raises(ValueError, match="no kernels for AvgPool2d, Conv2d, MaxPool2d"):
        accelerate(fresh("cnn"), "native")
    with pytest.raises(ValueError, match="does not define the size of the network's inputs"):
        accelerate(nn.Sequential(nn.ReLU(), nn.Linear(3, 2)), "native")
    with pytest.raises(ValueError, match="takes 6 inputs, but the one before has 5 outputs"):
        accelerate(nn.Sequential(nn.Linear(3, 5), nn.Linear(6, 2)), "native")
    with pytest.raises(ValueError, match="SLinear is computed with one output only"):
        accelerate(nn.Sequential(nn.SLSTM(1, 4, seq_len=1), nn.SLinear(4, 2)), "native")
    with pytest.raises(ValueError, match=r"float32, but device is 'cpu' and precision 'bfloat16'"):
        accelerate(fresh("mlp"), "native", precision="bfloat16")


# --- series ---------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.integers(1, 5),
    hidden=st.integers(1, 11),
    depth=st.integers(1, 2),
    steps=st.integers(1, 9),
    seed=st.integers(0, 2**31 - 1),
)
def test_smoothers(inputs: int, hidden: int, depth: int, steps: int, seed: int) -> None:
    """Two series: outputs, parameters, smoothed outputs and states as the engine's."""
    import pytagi
    import pytagi.nn as nn

    def network() -> Any:
        pytagi.manual_seed(seed)
        layers = [nn.SLSTM(inputs if i == 0 else hidden, hidden, seq_len=1) for i in range(depth)]
        return nn.Sequential(*layers, nn.SLinear(hidden, 1))

    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    ours = accelerate(ours, "native")
    rng = np.random.default_rng(seed)
    for model in (plain, ours):
        model.num_samples = steps
    for _ in range(2):
        for _ in range(steps):
            x, y = rng.standard_normal(inputs), rng.standard_normal(1)
            for model in (plain, ours):
                learn(model, x.astype(np.float32), y.astype(np.float32))
                model.step()
        smoothed = [model.smoother() for model in (ours, plain)]
        for own, engines in zip(*smoothed, strict=True):
            np.testing.assert_allclose(own, engines, rtol=1e-3, atol=1e-5)
        for step in range(steps):
            states = [model.get_lstm_states(step) for model in (ours, plain)]
            for index in range(depth):
                for own, engines in zip(*(s[index] for s in states), strict=True):
                    np.testing.assert_allclose(own, engines, rtol=1e-3, atol=1e-5)
    assert distance(parameters(ours), parameters(plain)) < 1e-4


def test_a_series_is_no_longer_than_told() -> None:
    import pytagi.nn as nn

    model = accelerate(nn.Sequential(nn.SLSTM(1, 4, seq_len=1), nn.SLinear(4, 1)))
    with pytest.raises(RuntimeError, match="no smoothed outputs before a smoother"):
        model.get_outputs_smoother()
    model.num_samples = 2
    one = np.ones(1, np.float32)
    for _ in range(2):
        model.learn(one, one, 0.1)
    with pytest.raises(ValueError, match="more than num_samples = 2 steps"):
        model.learn(one, one, 0.1)
    model.smoother()
    model.learn(one, one, 0.1)
    with pytest.raises(ValueError, match="time_step is 2, but the series has num_samples = 2"):
        model.get_lstm_states(2)


# --- whole steps ----------------------------------------------------------------------------------


def observed(way: str, model: Any, rng: np.random.Generator, batch: int) -> dict[str, Any]:
    """Return observations of 6 outputs, one NaN if it may be, as arguments of an update."""
    count = {"update": 6, "update_using_indices": 2, "update_heteros": 3}[way]
    mu = rng.standard_normal((batch, count)).astype(np.float32)
    if way == "update":
        mu[0, 1] = np.nan
    observations: dict[str, Any] = {"mu_obs": mu}
    if way != "update_heteros":
        observations["var_obs"] = rng.uniform(0.1, 1, (batch, count)).astype(np.float32)
    if way == "update_using_indices":
        numbers = [rng.permutation(6)[:2] + 1 for _ in range(batch)]
        observations["selected_idx"] = np.array(numbers, np.int32)
    return observations


@pytest.mark.parametrize("way", ["update", "update_using_indices", "update_heteros"])
@pytest.mark.parametrize("compute", COMPUTES)
def test_learn_is_four_calls(compute: Any, way: str) -> None:
    import pytagi
    import pytagi.nn as nn

    def network() -> Any:
        pytagi.manual_seed(3)
        return accelerate(
            nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 6), nn.EvenExp()), compute
        )

    rng = np.random.default_rng(0)
    one, four = network(), network()
    updater = OutputUpdater(four)
    for batch in (1, 5, 3) * 2:  # the first of a size is four calls inside
        x = rng.standard_normal((batch, 4)).astype(np.float32)
        variance = rng.uniform(0, 0.1, (batch, 4)).astype(np.float32)
        observations = observed(way, four, rng, batch)
        predicted = one.learn(x, **observations, var_x=variance)
        expected = four.forward(x, variance)
        getattr(updater, way)(**observations)
        four.backward()
        four.step()
        np.testing.assert_array_equal(predicted, expected)
    assert one.check_replicas() == four.check_replicas()


@pytest.mark.parametrize("compute", COMPUTES)
def test_learn_takes_what_people_have(compute: Any) -> None:
    """Lists, float64, a number for the noise, columns of a table."""
    x, y = NETWORKS["mlp"].batch(0, 4)
    table = np.asfortranarray(np.hstack([x, y]).astype(np.float64))
    models = [accelerate(fresh("mlp"), compute) for _ in range(3)]
    noise = np.full(y.shape, SIGMA_V**2, np.float32)
    models[0].learn(x, y, noise)
    models[1].learn(x.tolist(), y.tolist(), SIGMA_V**2)
    models[2].learn(table[:, :12], table[:, 12:], noise.tolist())
    assert len({model.check_replicas() for model in models}) == 1


@pytest.mark.parametrize("compute", COMPUTES)
def test_learn_refuses(compute: Any) -> None:
    model = accelerate(fresh("mlp"), compute)
    x, y = NETWORKS["mlp"].batch(0, 4)
    before = model.check_replicas()
    for wrong, error in [
        ((x, y[:3], 0.1), "mu_obs"),
        ((x, y, np.ones(3, np.float32)), "var_obs"),
        ((x[:, :5], y, 0.1), r"mu_x has the shape \(4, 5\), but the network takes samp"),
        ((x, y, None, np.ones((4, 1), np.int32)), "selected_idx needs var_obs"),
        ((x, y[:, :1], 0.1, np.full((4, 1), 6, np.int32)), "selected_idx has number"),
        ((x, y), r"var_obs \(noise\) is None, .* ends in EvenExp"),
    ]:
        with pytest.raises(ValueError, match=error):
            model.learn(*wrong)
    with pytest.raises(TypeError, match=r"mu_obs \(y\) must be an array of numbers"):
        model.learn(x, np.array(["a"] * y.size), 0.1)
    model.eval()
    with pytest.raises(RuntimeError, match="train"):
        model.learn(x, y, 0.1)
    model.train()
    with pytest.raises(NotFiniteError, match=r"ranks \[0\].*Linear\(12,32\)"):
        model.learn(x * np.float32(np.inf), y, 0.1)
    assert model.check_replicas() == before
    model.learn(x, y, 0.1)
    assert model.check_replicas() != before
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        model.learn(x, y, 0.1)


def test_learn_adds_to_micro_batches() -> None:
    """After no_sync() the step is that of all batches."""
    x, y = NETWORKS["mlp"].batch(0, 6)
    whole, parts = (accelerate(fresh("mlp"), "native") for _ in range(2))
    whole.learn(x, y, SIGMA_V**2)
    with parts.no_sync():
        learn(parts, x[:4], y[:4])
    parts.learn(x[4:], y[4:], SIGMA_V**2)
    assert distance(parameters(whole), parameters(parts)) < 1e-5


# --- by the size of a batch -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "lstm", "layer_norm", "embedding"])
def test_either_goes_on_from_the_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "limit", lambda *_: 7.5)
    model, plain = accelerate(fresh(name)), accelerate(fresh(name), "engine")
    computed = []
    for step, batch in enumerate((7, 7, 8, 6, 9, 9, 6)):
        for one in (model, plain):
            learn(one, *NETWORKS[name].batch(step, batch))
            one.step()
        computed.append(model.compute.name)
    assert computed == [*["native"] * 2, "torch", "native", *["torch"] * 2, "native"]
    assert distance(parameters(model), parameters(plain)) < 1e-5


def test_threads_are_for_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        monkeypatch.setattr(native, "limit", lambda *_: 7.5)
        model = accelerate(fresh("mlp"))
        model.set_threads(before + 1)
        for batch, threads in ((4, before), (8, before + 1)):
            model.learn(*NETWORKS["mlp"].batch(0, batch), 0.1)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_tensors_are_torchs() -> None:
    import torch

    model = accelerate(fresh("mlp"))
    x, _ = NETWORKS["mlp"].batch(0, 4)
    model.forward(x)
    assert model.compute.name == "native"
    means, _ = model.forward(torch.from_numpy(x))
    assert isinstance(means, torch.Tensor)
    assert model.compute.name == "torch"
    np.testing.assert_allclose(model.forward(x)[0], means.numpy(), rtol=1e-5, atol=1e-6)
    assert model.compute.name == "native"


def test_arrays_of_any_kind() -> None:
    """Train on arrays of any kind. Those that the backend does not take are copied first."""
    import pytagi.nn as nn

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((4, 3)).astype(np.float32), np.ones(4, np.float32)
    misaligned = np.frombuffer(b"\0" + x.tobytes(), np.float32, offset=1)
    read_only = x.copy()
    read_only.flags.writeable = False
    state = nn.Sequential(nn.Linear(3, 1)).state_dict()
    found = []
    for inputs in (x, read_only, np.asfortranarray(x), misaligned, x.astype(">f4"), x.tolist()):
        network = nn.Sequential(nn.Linear(3, 1))
        network.load_state_dict(state)
        model = accelerate(network, "native")
        updater = nn.OutputUpdater("cpu")
        for _ in range(2):  # the second is one call
            outputs = model.learn(inputs, y, 1.0)
        model(inputs)
        for observed in (y[:, np.newaxis], y.tolist(), y.astype(">f4")):
            updater.update(
                model.output_z_buffer, observed, np.ones((4, 1)), model.input_delta_z_buffer
            )
        model.backward()
        model.step()
        found.append((*outputs, *model(inputs)))
    for others in found[1:]:
        np.testing.assert_array_equal(others, found[0])
