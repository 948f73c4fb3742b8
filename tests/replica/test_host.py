"""The memory of every kind of layer, against the engine's public getters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.engines import require_activation, require_wheel
from support.networks import after_series, after_words, in_steps, last_step

from tagi_ddp import _backend
from tagi_ddp.engine import pointers
from tagi_ddp.engine.layers import DELTAS, PARAMETERS, walk
from tagi_ddp.engine.layout import batch_norm_address, check_layer, find_layout
from tagi_ddp.engine.loader import load_engine
from tagi_ddp.replica.host import Copied, InPlace, attach

load_engine()

import pytagi  # noqa: E402  (after the libraries that it needs)
from pytagi import nn  # noqa: E402

IMAGE = {"in_width": 8, "in_height": 8}


def convolutional(*layers: Any) -> Any:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, **IMAGE), *layers)


# Every class of pytagi.nn that is a layer, in a network whose input has the given size.
NETWORKS: dict[str, tuple[int, Callable[[], Any]]] = {
    "Linear": (3, lambda: nn.Sequential(nn.Linear(3, 2))),
    "Linear without bias": (3, lambda: nn.Sequential(nn.Linear(3, 2, bias=False))),
    "Conv2d": (64, lambda: convolutional(nn.ReLU(), nn.Linear(256, 2))),
    "ConvTranspose2d": (
        64,
        lambda: nn.Sequential(nn.ConvTranspose2d(1, 2, 3, padding=1, **IMAGE), nn.Linear(128, 2)),
    ),
    "BatchNorm2d": (64, lambda: convolutional(nn.BatchNorm2d(4), nn.Linear(256, 2))),
    "LayerNorm": (3, lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm([4]), nn.Linear(4, 2))),
    "LSTM": (
        6,
        lambda: nn.Sequential(
            nn.LSTM(2, 4, seq_len=3, **last_step()), nn.Linear(after_series(4, 3), 2)
        ),
    ),
    "Embedding": (
        3,
        lambda: nn.Sequential(
            nn.Embedding(10, 4, 3), *after_words(4, 3), nn.Linear(after_series(4, 3), 2)
        ),
    ),
    "AvgPool2d": (64, lambda: convolutional(nn.AvgPool2d(2, 2), nn.Linear(64, 2))),
    "MaxPool2d": (64, lambda: convolutional(nn.MaxPool2d(2, 2), nn.Linear(64, 2))),
    "ResNetBlock": (
        64,
        lambda: convolutional(
            nn.ResNetBlock(
                nn.LayerBlock(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(6)),
                nn.LayerBlock(nn.Conv2d(4, 6, 1), nn.ReLU()),
            ),
            nn.ResNetBlock(nn.LayerBlock(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU())),
            nn.LayerBlock(nn.Conv2d(6, 2, 1), nn.ReLU()),
            nn.Linear(128, 2),
        ),
    ),
    **(
        {"RMSNorm": (3, lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm([4]), nn.Linear(4, 2)))}
        if hasattr(nn, "RMSNorm")
        else {}
    ),
    **{
        name: (3, lambda name=name: nn.Sequential(nn.Linear(3, 2), getattr(nn, name)()))
        for name in (
            *("ReLU", "Sigmoid", "Tanh", "MixtureReLU", "MixtureSigmoid", "MixtureTanh"),
            *("LeakyReLU", "Softmax", "ClosedFormSoftmax", "EvenExp", "Remax"),
        )
    },
}


def trained(name: str) -> Any:
    """Run one step, so that every delta of the network has been written."""
    require_activation(name)
    inputs, build = NETWORKS[name]
    pytagi.manual_seed(5)  # by chance, ReLU would let nothing pass
    model = build()
    x = np.linspace(0, 2, 4 * inputs, dtype=np.float32).reshape(4, -1)
    model.forward(in_steps(model, x))
    size = len(model.get_outputs()[0])
    nn.OutputUpdater("cpu").update(
        model.output_z_buffer,
        np.ones(size, np.float32),
        np.full(size, 0.5, np.float32),
        model.input_delta_z_buffer,
    )
    model.backward()
    model.step()
    return model


def test_the_list_is_complete() -> None:
    no_layers = {"BaseLayer", "BaseHiddenStates", "BaseDeltaStates", "HRCSoftmax", "OutputUpdater"}
    no_layers |= {"Sequential", "DDPConfig", "DDPSequential"}
    no_layers |= {"Softplus"}  # pytagi 0.2.1 names it, but its extension lacks it
    no_layers |= {"MultiheadAttention"}  # only one rank may have it
    tested = {*NETWORKS, "LayerBlock", "SLSTM", "SLinear"}
    classes = {name for name, value in vars(nn).items() if isinstance(value, type)}
    assert classes - no_layers <= tested


@pytest.mark.parametrize("kind", NETWORKS)
def test_memory_is_what_the_getters_say(kind: str) -> None:
    model = trained(kind)
    replica = InPlace(model)
    replica.pull()
    state: dict[str, list[Any]] = {}
    for name, array in replica.state():
        state.setdefault(name, []).append(array.tolist())
    for layer in walk(model):
        if layer.handle.mu_w:
            expected = [getattr(layer.handle, vector) for vector in PARAMETERS]
            assert state.pop(layer.name)[:4] == expected  # running statistics follow
    assert not state
    for layer in replica.layers:
        address = pointers.address_of(layer.handle) + find_layout().vectors
        memory = _backend.engine_vectors(address)
        for vector in PARAMETERS + DELTAS:
            assert memory.view(vector).tolist() == getattr(layer.handle, vector)
    bucket = np.empty(2 * replica.parameters.size, np.float32)
    replica.parameters.pack(bucket)
    deltas = [
        np.concatenate(
            [
                getattr(layer.handle, f"delta_{kind}_{part}")
                for layer in replica.layers
                for part in "wb"
            ]
        )
        for kind in ("mu", "var")
    ]
    np.testing.assert_array_equal(bucket, np.concatenate(deltas).astype(np.float32))
    assert np.any(bucket)


def smoother() -> Any:
    model = nn.Sequential(nn.SLSTM(1, 4, seq_len=1), nn.SLSTM(4, 4, seq_len=1), nn.SLinear(4, 1))
    model.num_samples = 5
    return model


def test_smoother() -> None:
    replica = attach(smoother())
    assert [layer.kind for layer in replica.layers] == ["SLSTM", "SLSTM", "SLinear"]
    assert replica.parameters.size == sum(
        len(layer.handle.mu_w) + len(layer.handle.mu_b) for layer in replica.layers
    )


@pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d", "LSTM", "ResNetBlock"])
def test_attaching_keeps_what_was_loaded(name: str) -> None:
    """Also where the engine would draw new parameters, because it has not seen a batch yet."""
    source = trained(name)
    model = NETWORKS[name][1]()
    model.load_state_dict(source.state_dict())
    attach(model)
    assert model.state_dict() == source.state_dict()
    model.forward(in_steps(model, np.zeros((1, NETWORKS[name][0]), np.float32)))
    assert model.state_dict() == source.state_dict()


def test_running_statistics_are_in_place() -> None:
    model = trained("BatchNorm2d")
    norm = model._cpp_backend.layers[1]
    mean, var, eps, momentum, first = _backend.batch_norm_statistics(batch_norm_address(norm))
    ((public_mean,), (public_var,), *_) = model.get_norm_mean_var()["BatchNorm2d()_1"]
    assert (mean.tolist(), var.tolist()) == (public_mean, public_var)
    assert (eps, momentum, first[0]) == (pytest.approx(1e-5), pytest.approx(0.9), 0)
    mean[2] = 42
    assert model.get_norm_mean_var()["BatchNorm2d()_1"][0][0][2] == 42


def test_a_vector_of_another_size_is_noticed() -> None:
    model = trained("Linear")
    replica = InPlace(model)
    layer = model._cpp_backend.layers[0]
    for name in PARAMETERS + DELTAS:
        setattr(layer, name, [1.0] * 100)
    with pytest.raises(RuntimeError, match=r"Linear\(3,2\).*Wrap the model after"):
        replica.pull()


def test_a_moved_vector_is_followed() -> None:
    model = trained("Linear")
    replica = InPlace(model)
    layer = model._cpp_backend.layers[0]
    kept = [layer.mu_w, [0.25] * 6]  # a new vector, elsewhere in memory
    layer.delta_mu_w = kept[1]
    layer.delta_var_w = [0.0] * 6
    replica.pull()
    bucket = np.empty(2 * replica.parameters.size, np.float32)
    replica.parameters.pack(bucket)
    assert bucket[:6].tolist() == [0.25] * 6


class Elsewhere:
    """A layer whose fields are not what its memory says."""

    def __init__(self, layer: Any, **changes: Any) -> None:
        self._layer, self._changes = layer, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._layer, name)


@pytest.mark.parametrize(
    "changes", [{"mu_w": [1.0] * 5}, {"var_w": [1.0] * 6}, {"delta_var_b": [3.0, 3.0]}]
)
def test_a_layer_that_is_elsewhere_is_refused(changes: dict[str, Any]) -> None:
    layer = trained("Linear")._cpp_backend.layers[0]
    address = pointers.address_of(layer)
    check_layer(layer, address, find_layout())
    with pytest.raises(pointers.LayoutError, match=next(iter(changes))):
        check_layer(Elsewhere(layer, **changes), address, find_layout())


def test_no_conduit() -> None:
    with pytest.raises(pointers.LayoutError, match="conduit"):
        pointers.address_of(object())


def test_wrong_choice_of_access(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "quick")
    with pytest.raises(ValueError, match="TAGI_DDP_ENGINE_ACCESS is 'quick'; use \"auto\""):
        attach(trained("Linear"))


def test_copies_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "public")
    model = trained("LSTM")
    replica = attach(model)
    assert isinstance(replica, Copied)
    replica.pull()
    for _, array in replica.state():
        array += 1
    replica.push()
    for layer in replica.layers:
        assert min(layer.handle.var_w) > 1


def test_a_network_that_was_on_a_gpu() -> None:
    """The wheel makes CUDA objects of layers without parameters where there is no GPU, too."""
    require_wheel()
    import cutagi

    block = cutagi.LayerBlock([cutagi.ReLU()])
    block.switch_to_cuda()
    model = nn.Sequential(nn.Linear(3, 2))
    model._cpp_backend = cutagi.Sequential([block])
    for device in ("cuda:0", "cpu"):
        model.device = device
        with pytest.raises(ValueError, match=r"its to_device\(\): .* device='cuda:0' and"):
            attach(model)
