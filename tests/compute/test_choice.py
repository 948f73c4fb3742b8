"""The choice of a compute, and the warnings and notes about it."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, distance, fresh, learn, parameters

from tagi_ddp.compute.choose import _note
from tagi_ddp.engine import buffers, options, pointers
from tagi_ddp.sequential import accelerate


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else found(name)
    )


def without_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any) -> Any:
        raise pointers.LayoutError("mu_a is elsewhere")

    buffers.verify_buffers.cache_clear()
    monkeypatch.setattr(buffers.OutputBuffers, "write_states", unknown)


def without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: Any) -> Any:
        raise pointers.LayoutError("the stride is elsewhere")

    monkeypatch.setattr(options, "_read", unknown)


def through_public_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "public")


REASONS = {
    without_buffers: "mu_a is elsewhere",
    without_windows: "the stride is elsewhere",
    through_public_interface: "memory cannot be used in place",
}


@pytest.mark.parametrize("reason", REASONS, ids=lambda reason: reason.__name__)
def test_the_engine_where_torch_cannot(reason: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reason(monkeypatch)
    with pytest.warns(RuntimeWarning, match=REASONS[reason]) as record:
        model = accelerate(fresh("cnn"))
    assert len(record) == 1
    assert model.compute.name == "engine"
    with pytest.raises(ValueError, match=REASONS[reason]):
        accelerate(fresh("cnn"), "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerate(fresh("cnn"), "engine")


def test_without_torch_the_engine_with_a_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A line of the log, once, and no warning, which could end a script."""
    without_torch(monkeypatch)
    _note.cache_clear()
    for _ in range(2):
        assert accelerate(fresh("cnn")).compute.name == "engine"
    (record,) = caplog.records
    assert "torch is not installed (pip install torch)" in record.getMessage()
    with pytest.raises(ValueError, match="torch is not installed"):
        accelerate(fresh("cnn"), "torch")


BY_TORCH = ("cnn", "resnet", "batch_norm", "autoencoder")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_fast_one_where_it_can(name: str) -> None:
    assert accelerate(fresh(name)).compute.name == ("torch" if name in BY_TORCH else "native")


def test_small_networks_need_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert accelerate(fresh("mlp")).compute.name == "native"


def test_smoothers() -> None:
    import pytagi
    from pytagi.nn import SLSTM, Sequential, SLinear

    def network() -> Any:
        pytagi.manual_seed(3)
        return Sequential(SLSTM(1, 4, seq_len=1), SLinear(4, 1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = accelerate(network())
    assert model.compute.name == "native"
    with pytest.raises(ValueError, match="torch does not compute SLSTM, SLinear"):
        accelerate(network(), "torch")
    plain = network()
    for one in (model, plain):
        one.num_samples = 5
        for sample in range(5):
            learn(one, np.full((1, 1), sample / 5, np.float32), np.ones((1, 1), np.float32))
            one.step()
        one.smoother()
    for ours, engines in zip(*(m.get_outputs_smoother() for m in (model, plain)), strict=True):
        np.testing.assert_allclose(ours, engines, rtol=1e-4, atol=1e-6)
    assert distance(parameters(model), parameters(plain)) < 1e-5
