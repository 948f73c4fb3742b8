"""The formulas in which engines differ: the one that is there, and stand-ins for others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.networks import after_series, distance, fresh, in_steps, last_step, parameters

from tagi_ddp import DDPConfig, DDPSequential, accelerate
from tagi_ddp.compute import formulas
from tagi_ddp.engine import dialect as dialects
from tagi_ddp.engine.dialect import Dialect, DialectError, check_step, dialect
from tagi_ddp.engine.layers import Layer
from tagi_ddp.sequential import placement


@pytest.fixture
def clean() -> Iterator[None]:
    """Look at the engine anew, in the test and after it."""
    caches = (check_step, dialect, formulas._agrees)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def stepping(change: Any) -> Any:
    """Return a class of networks whose step is followed by ``change`` of their first layer."""
    import cutagi

    class Sequential(cutagi.Sequential):  # type: ignore[misc]
        def step(self) -> None:
            before = list(self.layers[0].mu_w)
            super().step()
            change(self.layers[0], before)

    return Sequential


def pull(layer: Any, before: list[float]) -> None:
    """Move the means without deltas towards a prior, as later engines can."""
    layer.mu_w = [mu if mu != old else 0.9 * mu for mu, old in zip(layer.mu_w, before, strict=True)]


def decay(layer: Any, before: list[float]) -> None:
    """Reduce the variances of biases."""
    layer.var_b = [0.9 * var for var in layer.var_b]


def cap_less(layer: Any, before: list[float]) -> None:
    """Make the step of another cap factor."""
    layer.mu_w = [mu + 0.5 * (mu - old) for mu, old in zip(layer.mu_w, before, strict=True)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (pull, "more or less than their deltas"),
        (decay, "more or less than their deltas"),
        (cap_less, "cap factor for a batch of"),
    ],
)
def test_another_step_is_refused_by_name(
    clean: None, change: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cutagi

    monkeypatch.setattr(cutagi, "Sequential", stepping(change))
    with pytest.raises(DialectError, match=text):
        check_step()
    model = fresh("mlp")
    with pytest.raises(ValueError, match=text):
        DDPSequential(model, DDPConfig([], "auto"))


def test_the_step_of_the_engine_that_is_there(clean: None) -> None:
    check_step()


def test_no_look_draws_from_the_engines_generator(clean: None) -> None:
    """A script that has set a seed gets the same network, whenever it is wrapped."""
    import cutagi
    import pytagi

    def drawn() -> list[float]:
        weights: list[float] = cutagi.Linear(3, 3, True, 1.0, 1.0, "He", 0).mu_w
        return weights

    pytagi.manual_seed(1)
    expected = drawn()
    pytagi.manual_seed(1)
    check_step()
    dialect()
    for kind in (*formulas._RECIPES, "ReLU", "EvenExp"):
        if hasattr(cutagi, kind):
            assert formulas._agrees(kind)
    assert drawn() == expected


@pytest.mark.parametrize("compute", ["native", "torch"])
def test_kernels_that_compute_otherwise_are_not_used(
    clean: None, compute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine then keeps the network, with a warning that names the layer."""
    from pytagi.nn import EvenExp, Linear, Sequential

    there = dialect()
    other = Dialect(not there.exp_covariance, there.sequences, there.free_rms_norm)
    for module in (formulas.native, _activations()):
        monkeypatch.setattr(module, "dialect", lambda: other)
    formulas._agrees.cache_clear()

    def network() -> Any:
        return Sequential(Linear(3, 4), EvenExp())

    with pytest.raises(ValueError, match="computes EvenExp by another formula"):
        accelerate(network(), compute)
    with pytest.warns(RuntimeWarning, match="this engine computes EvenExp by another formula"):
        model = accelerate(network())
    assert model.compute.name == "engine"


def _activations() -> Any:
    from tagi_ddp.compute import activations

    return activations


def test_an_unknown_jacobian_is_an_error(clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialects.math, "isclose", lambda *_, **__: False)
    with pytest.raises(DialectError, match=r"EvenExp has the jacobian .*, which is not known"):
        dialects._exp_covariance()


def test_attention_is_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two:
        size, device = 2, "cpu"

    attention = Layer("1 (MultiheadAttention())", "MultiheadAttention", None)
    monkeypatch.setattr(placement, "walk", lambda model: [attention])
    with pytest.raises(ValueError, match=r"layer 1 .*mixes the samples of a batch.*one rank"):
        placement.attach_replica(fresh("mlp"), "cpu", Two())  # type: ignore[arg-type]


def test_dialects_in_words() -> None:
    assert str(Dialect(True, False, False)) == (
        "EvenExp's jacobian is the covariance of z and exp(z); "
        "LSTMs do not carry their states from step to step of a sample"
    )
    assert "the mean of exp(z)" in str(Dialect(False, True, True))
    assert "RMSNorm's cap factor is 1" in str(Dialect(False, True, True))


def test_cap_factors_of_layers() -> None:
    from tagi_ddp._backend import Parameters, cap_factor

    table = Parameters()
    arrays = []
    for rows in (1, 3, 0):
        layer = [np.full(2, value, np.float32) for value in (0, 0.25, 100, 0)]
        none = [np.zeros(0, np.float32) for _ in range(4)]
        table.add_layer(f"layer {rows}", layer, none, np.zeros(1, np.int32), rows)
        arrays.append((layer, none))
    assert table.cap_factors(100) == [cap_factor(100), cap_factor(300), 1]
    table.apply_own(100)
    moved = [layer[0].tolist() for layer, _ in arrays]
    assert np.allclose(moved, [[0.5 / 2] * 2, [0.5 / 3] * 2, [0.5] * 2], rtol=1e-4)


def trained(model: Any, inputs: int, outputs: int, learns_noise: bool) -> dict[str, Any]:
    """Return the parameters after four steps by pytagi's four calls."""
    from pytagi.nn import OutputUpdater

    rng = np.random.default_rng(0)
    updater = OutputUpdater("cpu")
    for batch in (1, 7, 7, 300):
        x = rng.normal(size=(batch, inputs)).astype(np.float32)
        y = rng.normal(size=batch * outputs).astype(np.float32)
        model.forward(in_steps(model, x))
        states, deltas = model.output_z_buffer, model.input_delta_z_buffer
        if learns_noise:
            updater.update_heteros(states, y, deltas)
        else:
            updater.update(states, y, np.full(y.size, 0.25, np.float32), deltas)
        model.backward()
        model.step()
    return parameters(model)


@pytest.mark.parametrize("compute", ["engine", "native", "torch", "auto"])
@pytest.mark.parametrize("kind", ["EvenExp", "LSTM", "RMSNorm", "LayerNorm", "Remax"])
def test_training_is_that_of_the_engine_that_is_there(kind: str, compute: Any) -> None:
    """The engine's own loop is the oracle, with batches of 1, 7 and 300: each has a cap factor."""
    import pytagi
    from pytagi import nn

    if not hasattr(nn, kind):
        pytest.skip(f"this engine has no {kind}")

    def network() -> Any:
        pytagi.manual_seed(2)
        if kind == "LSTM":
            series = nn.LSTM(2, 5, seq_len=3), nn.LSTM(5, 4, seq_len=3, **last_step())
            return nn.Sequential(*series, nn.Linear(after_series(4, 3), 2))
        norm = [getattr(nn, kind)([8])] if kind.endswith("Norm") else []
        activation = [getattr(nn, kind)()] if not norm else []
        return nn.Sequential(nn.Linear(6, 8), *norm, nn.Linear(8, 2), *activation)

    noisy = kind == "EvenExp"
    outputs = 1 if noisy else 2
    plain = network()
    # The engine's buffers are those of its first batch: a greater one would not fit.
    plain.forward(in_steps(plain, np.zeros((300, 6), np.float32)))
    expected = trained(plain, 6, outputs, noisy)
    ours = trained(accelerate(network(), compute), 6, outputs, noisy)
    assert distance(ours, expected) < 1e-4
