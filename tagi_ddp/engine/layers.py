"""The layers of a pytagi Sequential that hold parameters, blocks included."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PARAMETERS = ("mu_w", "var_w", "mu_b", "var_b")
DELTAS = ("delta_mu_w", "delta_var_w", "delta_mu_b", "delta_var_b")
_INITIALISED_LATE = ("Conv2d", "ConvTranspose2d", "LSTM", "SLSTM")


ACTIVATIONS = (
    *("ReLU", "Sigmoid", "Tanh", "LeakyReLU", "MixtureReLU", "MixtureSigmoid", "MixtureTanh"),
    *("MixtureSoftplus", "EvenExp", "Softmax", "Remax", "ClosedFormSoftmax"),
)
# The kinds of layer that are known to keep all parameters in these vectors, or to have none.
_KNOWN = (
    *("Linear", "Conv2d", "ConvTranspose2d", "BatchNorm2d", "LayerNorm", "Embedding", "LSTM"),
    *("SLSTM", "SLinear", "AvgPool2d", "MaxPool2d", "Softplus", *ACTIVATIONS),
)


@dataclass(frozen=True)
class Layer:
    """A layer: its name, which has its path, and the engine's object, which owns its memory."""

    name: str
    kind: str
    handle: Any

    @property
    def accumulates(self) -> bool:
        """True if the engine's backward adds to the deltas instead of replacing them."""
        return self.kind == "Embedding"


def walk(model: Any) -> Iterator[Layer]:
    """Yield the layers of a Sequential in order; the layers inside a block replace the block.

    A name is the path and the engine's description, like "3.main_block.1 (Conv2d(4,4,8,8,3))".
    """
    for index, handle in enumerate(model._cpp_backend.layers):
        yield from _walk(str(index), handle)


def _walk(path: str, handle: Any) -> Iterator[Layer]:
    kind = type(handle).__name__
    if kind == "ResNetBlock":
        yield from _walk(f"{path}.main_block", handle.main_block)
        if handle.shortcut is not None:
            yield from _walk(f"{path}.shortcut", handle.shortcut)
    elif kind == "LayerBlock":
        for index, inner in enumerate(handle.layers):
            yield from _walk(f"{path}.{index}", inner)
    else:
        yield Layer(f"{path} ({handle.get_layer_info()})", kind, handle)


def require_all_parameters(model: Any) -> None:
    """Raise ValueError if `state_dict` shows other parameters than the layers' vectors hold.

    The others would never be exchanged. The engine copies all for that, so layers of known kinds
    are not compared.
    """
    layers = list(walk(model))
    unknown = [layer for layer in layers if layer.kind not in _KNOWN]
    if not unknown:
        return
    shown = sum(len(part) for parts in model.state_dict().values() for part in parts)
    found = sum(len(getattr(layer.handle, name)) for layer in layers for name in PARAMETERS)
    if shown != found:
        names = ", ".join(layer.name for layer in unknown)
        raise ValueError(
            f"the engine shows {shown} parameters, but its layers hold {found} where this package "
            f"looks for them; those of {names} may be elsewhere. Ranks would not exchange them: "
            "leave such layers out, or train by the engine alone"
        )


def lstm_steps(handle: Any) -> int:
    """Return the number of steps in each sample of an LSTM or SLSTM layer."""
    # The engine exposes it in this product only.
    width = max(int(handle.input_size), int(handle.output_size))
    return int(handle.get_max_num_states()) // width


def lstm_samples(handles: Sequence[Any], states: Mapping[int, Sequence[Any]]) -> int:
    """Return the size of the batch that LSTM ``states`` belong to; 0 without states.

    ``handles`` are the engine's layers; their indices are the keys of ``states``.
    """
    for index, parts in states.items():
        return len(parts[0]) // (lstm_steps(handles[index]) * int(handles[index].output_size))
    return 0


def require_even(samples: int) -> None:
    """Raise ValueError if a part of a batch has an odd number of samples."""
    if samples % 2:
        raise ValueError(
            f"mu_x has {samples} samples, but EvenExp layers of an odd number of outputs count "
            "them through the whole batch: give each rank and each micro-batch an even number of "
            "samples, or the layer an even number of outputs"
        )


def input_size_of(first: Any) -> int:
    """Return the inputs of a first layer, for a sample or a step of a series; 0: unknown."""
    return int(first.input_size) or int(first.in_width * first.in_height * first.in_channels)


def initialise(model: Any) -> None:
    """Initialise the parameters and deltas of all layers, which the engine delays to forward.

    Parameters that exist keep their values: the engine's own initialisation would draw new ones for
    some layers. Raises ValueError if the first layer does not define the size of its inputs, by
    which the engine would divide.
    """
    layers = list(walk(model))
    if layers and not input_size_of(layers[0].handle):
        raise ValueError(
            f"layer {layers[0].name} does not define the size of the network's inputs: begin with "
            "one that does, like Linear, or set Conv2d's in_width and in_height, Embedding's "
            "input_size"
        )
    late = [layer for layer in layers if layer.kind in _INITIALISED_LATE]
    if any(layer.handle.num_weights == 0 for layer in late):
        kept = [layer.handle for layer in late if layer.handle.mu_w]
        saved = [[getattr(handle, name) for name in PARAMETERS] for handle in kept]
        model._cpp_backend.preinit_layer()
        for handle, values in zip(kept, saved, strict=True):
            for name, value in zip(PARAMETERS, values, strict=True):
                setattr(handle, name, value)
    for layer in late:
        for name, delta in zip(PARAMETERS, DELTAS, strict=True):
            count = len(getattr(layer.handle, name))
            if len(getattr(layer.handle, delta)) != count:
                setattr(layer.handle, delta, [0.0] * count)
