"""Small networks of every kind of layer, and their data, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

SIGMA_V = 0.5


@dataclass(frozen=True)
class Network:
    """A function that builds a network, and the sizes of one sample."""

    build: Callable[[], Any]
    inputs: int
    outputs: int
    categories: int = 0  # inputs are indices below this, if it is not 0

    def batch(self, seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs [size, inputs] and targets [size, outputs], float32."""
        rng = np.random.default_rng(seed)
        if self.categories:
            x = rng.integers(0, self.categories, (size, self.inputs)).astype(np.float32)
        else:
            x = rng.normal(size=(size, self.inputs)).astype(np.float32)
        return x, rng.normal(size=(size, self.outputs)).astype(np.float32)


def last_step() -> dict[str, Any]:
    """Return the arguments of the last LSTM before a layer of another kind.

    In engines with sequences such a layer learns from the first step only, so it gets one.
    """
    from tagi_ddp.engine.dialect import dialect

    return {"last_timestep": True} if dialect().sequences else {}


def after_series(width: int, steps: int) -> int:
    """Return the inputs of the layer behind such an LSTM."""
    return width if last_step() else width * steps


def after_words(size: int, words: int) -> list[Any]:
    """Return the layers between an Embedding and one that takes `after_series` inputs."""
    from pytagi.nn import LSTM

    return [LSTM(size, size, seq_len=words, **last_step())] if last_step() else []


def in_steps(model: Any, x: np.ndarray) -> np.ndarray:
    """Return inputs as ``model``, a pytagi Sequential or ours, takes them: flat, or in steps."""
    from pytagi.nn import Sequential

    from tagi_ddp.engine.shapes import input_rows

    rows = input_rows(model) if isinstance(model, Sequential) else 1
    return x.ravel() if rows == 1 else x.reshape(len(x), rows, -1)


def mlp() -> Any:
    from pytagi.nn import Linear, ReLU, Sequential, Tanh

    return Sequential(Linear(12, 32), ReLU(), Linear(32, 24), Tanh(), Linear(24, 5))


def cnn() -> Any:
    from pytagi.nn import AvgPool2d, Conv2d, Linear, MaxPool2d, ReLU, Sequential

    return Sequential(
        Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8),
        ReLU(),
        AvgPool2d(2, 2),
        Conv2d(4, 6, 3, padding=1),
        ReLU(),
        MaxPool2d(2, 2),
        Linear(6 * 2 * 2, 5),
    )


def resnet() -> Any:
    from pytagi.nn import (
        AvgPool2d,
        Conv2d,
        LayerBlock,
        Linear,
        MixtureReLU,
        ResNetBlock,
        Sequential,
    )

    # The engine gives a block of a single layer no deltas, so every block here has two or more.
    # ReLU is not used, because a mean that rounds to the other side of 0 makes results jump.
    def two_convolutions(ins: int, outs: int) -> LayerBlock:
        return LayerBlock(
            Conv2d(ins, outs, 3, padding=1),
            MixtureReLU(),
            Conv2d(outs, outs, 3, padding=1),
            MixtureReLU(),
        )

    return Sequential(
        Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8),
        MixtureReLU(),
        ResNetBlock(
            LayerBlock(
                Conv2d(4, 6, 3, padding=1), MixtureReLU(), Conv2d(6, 6, 3, padding=1), MixtureReLU()
            ),
            LayerBlock(Conv2d(4, 6, 1), MixtureReLU()),
        ),
        MixtureReLU(),
        ResNetBlock(
            LayerBlock(
                Conv2d(6, 6, 3, padding=1), MixtureReLU(), Conv2d(6, 6, 3, padding=1), MixtureReLU()
            )
        ),
        MixtureReLU(),
        AvgPool2d(2, 2),
        Linear(6 * 4 * 4, 5),
    )


def batch_norm() -> Any:
    from pytagi.nn import (
        AvgPool2d,
        BatchNorm2d,
        Conv2d,
        LayerBlock,
        Linear,
        ReLU,
        ResNetBlock,
        Sequential,
    )

    return Sequential(
        Conv2d(1, 4, 3, padding=1, in_width=8, in_height=8, bias=False),
        BatchNorm2d(4),
        ReLU(),
        ResNetBlock(
            LayerBlock(Conv2d(4, 4, 3, padding=1, bias=False), BatchNorm2d(4), ReLU()),
            LayerBlock(Conv2d(4, 4, 1, bias=False), BatchNorm2d(4)),
        ),
        AvgPool2d(2, 2),
        Linear(4 * 4 * 4, 5),
    )


def lstm() -> Any:
    from pytagi.nn import LSTM, Linear, Sequential

    return Sequential(
        LSTM(2, 6, seq_len=4), LSTM(6, 6, seq_len=4, **last_step()), Linear(after_series(6, 4), 3)
    )


def embedding() -> Any:
    from pytagi.nn import Embedding, Linear, ReLU, Sequential

    head = Linear(after_series(4, 3), 16), ReLU(), Linear(16, 5)
    model = Sequential(Embedding(20, 4, 3), *after_words(4, 3), *head)
    # The engine draws an embedding's means regardless of its seed.
    model._cpp_backend.layers[0].mu_w = np.random.default_rng(7).normal(size=20 * 4).tolist()
    return model


def layer_norm() -> Any:
    from pytagi.nn import LayerNorm, Linear, ReLU, Sequential

    return Sequential(Linear(12, 16), LayerNorm([16]), ReLU(), Linear(16, 5))


def autoencoder() -> Any:
    from pytagi.nn import Conv2d, ConvTranspose2d, ReLU, Sequential

    return Sequential(
        Conv2d(1, 4, 4, stride=2, padding=1, in_width=8, in_height=8),
        ReLU(),
        ConvTranspose2d(4, 1, 3, stride=2, padding=1, padding_type=2),
    )


NETWORKS = {
    "mlp": Network(mlp, 12, 5),
    "cnn": Network(cnn, 64, 5),
    "resnet": Network(resnet, 64, 5),
    "batch_norm": Network(batch_norm, 64, 5),
    "lstm": Network(lstm, 8, 3),
    "embedding": Network(embedding, 3, 5, categories=20),
    "layer_norm": Network(layer_norm, 12, 5),
    "autoencoder": Network(autoencoder, 64, 64),
}
# Batch normalization uses the statistics of a rank's own share: no union to compare with.
EQUAL_TO_ONE_PROCESS = [name for name in NETWORKS if name != "batch_norm"]


def fresh(name: str) -> Any:
    """Build a network whose parameters are the same every time."""
    import pytagi

    pytagi.manual_seed(7)
    return NETWORKS[name].build()


def options_of(compute: str) -> dict[str, str]:
    """Return options of a network that is computed by, or, as "cpu:0", on a device by torch."""
    return {"compute": "torch", "device": compute} if ":" in compute else {"compute": compute}


def learn(model: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Run forward, output update and backward on a batch."""
    from pytagi.nn import OutputUpdater

    model.forward(in_steps(model, x))
    OutputUpdater("cpu").update(
        model.output_z_buffer,
        y.ravel(),
        np.full(y.size, SIGMA_V**2, np.float32),
        model.input_delta_z_buffer,
    )
    model.backward()


def parameters(model: Any) -> dict[str, list[np.ndarray]]:
    """Return the state_dict of a Sequential as arrays: (mu_w, var_w, mu_b, var_b) by layer."""
    return {k: [np.asarray(v, np.float32) for v in t] for k, t in model.state_dict().items()}


def parameters_and_averages(model: Any) -> dict[str, list[np.ndarray]]:
    """Return the parameters, and the running averages of batch normalization, by layer."""
    state = parameters(model)
    if any(layer.startswith("BatchNorm2d") for layer in state):
        for layer, (mean, variance, *_) in model.get_norm_mean_var().items():
            state[f"running {layer}"] = 2 * [np.ravel(mean), np.ravel(variance)]
    return state


def distance(a: dict[str, list[np.ndarray]], b: dict[str, list[np.ndarray]]) -> float:
    """Return the greater of the relative distances (2-norm) of all means and of all variances."""
    assert a.keys() == b.keys()

    def joined(state: dict[str, list[np.ndarray]], kind: int) -> np.ndarray:
        return np.concatenate([state[key][i] for key in sorted(state) for i in (kind, kind + 2)])

    return max(
        float(
            np.linalg.norm(joined(a, kind).astype(np.float64) - joined(b, kind))
            / np.linalg.norm(joined(b, kind).astype(np.float64))
        )
        for kind in (0, 1)
    )
