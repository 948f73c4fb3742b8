"""Our OutputUpdater gives what pytagi's gives, for whoever computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tagi_ddp
from tagi_ddp.compute.innovation import innovation
from tagi_ddp.compute.states import Dense, States

INPUTS, OUTPUTS = 3, 6
WAYS = ("update", "update_using_indices", "update_heteros")


def network(last: str) -> Any:
    import pytagi
    import pytagi.nn as nn

    pytagi.manual_seed(5)
    return nn.Sequential(nn.Linear(INPUTS, OUTPUTS), *([getattr(nn, last)()] if last else []))


def observations(rng: np.random.Generator, way: str, batch: int) -> dict[str, np.ndarray]:
    """Return what a method takes, flat, with some values that are no observations."""
    if way == "update_using_indices":
        picks = np.stack([rng.permutation(OUTPUTS)[:3] + 1 for _ in range(batch)])
        count = picks.size
        more = {"selected_idx": picks.ravel().astype(np.int32)}
    else:
        count, more = batch * (OUTPUTS if way == "update" else OUTPUTS // 2), {}
    y = rng.standard_normal(count).astype(np.float32)
    y[rng.random(count) < 0.2] = np.nan
    given_variance = {"var_obs": rng.uniform(0, 2, count).astype(np.float32)}
    return {"mu_obs": y, **(given_variance if way != "update_heteros" else {}), **more}


@given(
    way=st.sampled_from(WAYS),
    last=st.sampled_from(["", "ReLU", "EvenExp", "Tanh"]),
    batch=st.integers(1, 7),
    seed=st.integers(0, 2**31),
    kind=st.sampled_from([np.asarray, torch.from_numpy]),
)
def test_equal_to_pytagi(way: str, last: str, batch: int, seed: int, kind: Any) -> None:
    from pytagi.nn import OutputUpdater

    if way == "update_heteros":
        last = "EvenExp"  # any other lets the noise's variance be negative
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, INPUTS)).astype(np.float32)
    seen = observations(rng, way, batch)
    models = [tagi_ddp.accelerate(network(last), compute=c) for c in ("engine", "torch", "torch")]
    for model in models:
        model(x)
    expected, ours, theirs = models
    getattr(tagi_ddp.OutputUpdater(expected), way)(**seen)
    getattr(tagi_ddp.OutputUpdater(ours), way)(**{k: kind(v) for k, v in seen.items()})
    getattr(OutputUpdater("cpu"), way)(
        output_states=theirs.output_z_buffer, delta_states=theirs.input_delta_z_buffer, **seen
    )
    for model in models:
        model.backward()
        model.step()
    for name, values in expected.state_dict().items():
        for model in (ours, theirs):
            for got, value in zip(model.state_dict()[name], values, strict=True):
                np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5)


COMPUTES = ["engine", "native", "torch"]


DRAWN = {
    "way": st.sampled_from(WAYS),
    "compute": st.sampled_from(COMPUTES),
    "own": st.booleans(),
    "masked": st.booleans(),
    "batch": st.integers(1, 9),
    "seed": st.integers(0, 2**31),
}


@given(**DRAWN)
def test_missing_observations_are_as_good_as_none(
    way: str, compute: Any, own: bool, masked: bool, batch: int, seed: int
) -> None:
    """The innovation is 0 there, and elsewhere what it is of the others."""
    from pytagi.nn import OutputUpdater

    rng = np.random.default_rng(seed)
    model = tagi_ddp.accelerate(network("EvenExp"), compute=compute)
    seen = observations(rng, way, batch)
    missing = np.isnan(seen["mu_obs"])
    innovations = []
    for values in (
        np.ma.masked_array(np.where(missing, 7, seen["mu_obs"]), missing)
        if masked
        else seen["mu_obs"],
        np.where(missing, 3, seen["mu_obs"]).astype(np.float32),
    ):
        model(rng.standard_normal((batch, INPUTS)).astype(np.float32) * 0)
        arrays = {**seen, "mu_obs": values}
        if own:
            getattr(tagi_ddp.OutputUpdater(model), way)(**arrays)
        else:
            states, deltas = model.output_z_buffer, model.input_delta_z_buffer
            getattr(OutputUpdater("cpu"), way)(output_states=states, delta_states=deltas, **arrays)
        shown = model.input_delta_z_buffer
        innovations.append(
            np.array([part[: batch * OUTPUTS] for part in (shown.delta_mu, shown.delta_var)])
        )
    got, full = innovations
    gone = np.zeros(batch * OUTPUTS, bool)
    if way == "update_using_indices":
        numbers = seen["selected_idx"].reshape(batch, -1) + OUTPUTS * np.arange(batch)[:, None]
        gone[numbers.ravel()[missing] - 1] = True
    else:
        gone = missing if way == "update" else np.repeat(missing, 2)
    assert (got[:, gone] == 0).all()
    np.testing.assert_array_equal(got[:, ~gone], full[:, ~gone])


@pytest.mark.slow
@settings(max_examples=5000)
@given(**DRAWN)
def test_many_missing_observations(**drawn: Any) -> None:
    test_missing_observations_are_as_good_as_none.hypothesis.inner_test(**drawn)  # type: ignore[attr-defined]


def test_an_update_does_not_go_on_with_another_ones_sizes() -> None:
    """As many observations as before, of other samples: the engine would divide by zero."""
    from pytagi.nn import OutputUpdater

    updater = OutputUpdater("cpu:0")
    for batch, each in ((2, 4), (4, 2), (8, 1)):
        model = tagi_ddp.accelerate(network(""), compute="engine")
        model(np.ones((batch, INPUTS)))
        y, picks = np.ones(8, np.float32), np.tile(np.arange(1, each + 1), batch)
        buffers = model.output_z_buffer, model.input_delta_z_buffer
        if batch * OUTPUTS == y.size:
            updater.update(buffers[0], y, y, buffers[1])
        updater.update_using_indices(buffers[0], y, y, picks, buffers[1])
        innovation = np.array(buffers[1].delta_var[: batch * OUTPUTS]).reshape(batch, -1)
        assert (innovation[:, :each] < 0).all()
        assert (innovation[:, each:] == 0).all()


def test_masked_numbers_of_outputs_are_refused() -> None:
    model = tagi_ddp.accelerate(network(""), compute="torch")
    picks = np.ma.masked_array([1, 2], [False, True])
    with pytest.raises(ValueError, match="selected_idx has 1 masked"):
        model.learn(np.ones((2, INPUTS)), np.ones(2), np.ones(2), picks)


def test_no_observation_of_unknown_noise() -> None:
    model = tagi_ddp.accelerate(network("EvenExp"), compute="torch")
    model(np.ones((1, INPUTS)))
    tagi_ddp.OutputUpdater(model).update_heteros(np.array([np.nan, 1, 2]))
    innovation = model.compute.innovation  # type: ignore[attr-defined]
    for part in (innovation.mean, innovation.variance):
        assert (part[0, :2] == 0).all()
        assert (part[0, 2:] != 0).all()


@pytest.mark.parametrize("compute", ["engine", "torch"])
def test_wrong_observations(compute: Any) -> None:
    model = tagi_ddp.accelerate(network(""), compute=compute)
    updater = tagi_ddp.OutputUpdater(model)
    with pytest.raises(RuntimeError, match="forward"):
        updater.update(np.ones(OUTPUTS), np.ones(OUTPUTS))
    model(np.ones((2, INPUTS)))
    with pytest.raises(ValueError, match=r"mu_obs has 6 elements, but the outputs are \[2, 6\]"):
        updater.update(np.ones(OUTPUTS), np.ones(OUTPUTS))
    with pytest.raises(ValueError, match="var_obs"):
        updater.update(np.ones(2 * OUTPUTS), np.ones(OUTPUTS))


def test_the_buffer_shows_the_innovation_and_may_change_it() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, INPUTS)).astype(np.float32)
    seen = observations(rng, "update_using_indices", 2)
    shown, states = [], []
    for compute in ("engine", "torch"):
        model = tagi_ddp.accelerate(network(""), compute=compute)
        model(x)
        tagi_ddp.OutputUpdater(model).update_using_indices(**seen)
        deltas = model.input_delta_z_buffer
        shown.append(np.array([deltas.delta_mu, deltas.delta_var])[:, : 2 * OUTPUTS])
        model.set_delta_z(*np.full((2, 2 * OUTPUTS), -0.5, np.float32))
        model.backward()
        model.step()
        states.append([np.concatenate(values) for values in model.state_dict().values()])
    np.testing.assert_allclose(shown[1], shown[0], rtol=1e-5)
    np.testing.assert_allclose(states[1], states[0], rtol=1e-5)


def test_empty_share() -> None:
    model = tagi_ddp.accelerate(network(""), compute="torch")
    updater, nothing = tagi_ddp.OutputUpdater(model), np.empty(0)
    model(np.ones((2, INPUTS)))
    with pytest.raises(ValueError, match="mu_obs has 0 elements"):
        updater.update(nothing, nothing)
    model(nothing)
    updater.update(nothing, nothing)
    model.backward()
    before = model.check_replicas()
    model.step()
    assert model.check_replicas() == before


def test_plain_sequential() -> None:
    with pytest.raises(TypeError, match="accelerate"):
        tagi_ddp.OutputUpdater(network(""))  # type: ignore[arg-type]


@pytest.mark.parametrize("activated", [False, True])
def test_what_nothing_is_learned_from(activated: bool) -> None:
    """From NaN observations, and gains that are not finite; but an infinite one is a defect."""
    nan, inf = float("nan"), float("inf")
    jacobian = Dense(torch.ones(1, 6)) if activated else None
    variance = torch.tensor([[0.5, 0.5, 0.0, nan, -inf, 0.5]])
    states = States(torch.tensor([[1.0, 1.0, 1.0, nan, nan, 1.0]]), variance, jacobian)
    noise = torch.tensor([[0.5, 0.5, 0.0, 0.5, inf, 0.5]])
    found = innovation(states, torch.tensor([[2.0, nan, 2.0, 2.0, 2.0, inf]]), noise)
    assert found.mean.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0, inf]]
    assert found.variance.tolist() == [[-1.0, 0.0, 0.0, 0.0, 0.0, -1.0]]
