"""The innovation of a network's outputs from observations, on the device of the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp.checks import flat_floats, require_variances, shape_of, whole_numbers
from tagi_ddp.compute.interface import UpdateMethod
from tagi_ddp.compute.local_network import LocalNetwork
from tagi_ddp.sequential.interface import SequentialInterface


class OutputUpdater:
    """pytagi's OutputUpdater for one network, on the device of the network.

    pytagi's own works, too. This one reads the outputs of the last forward pass on their device and
    leaves the innovation there, so that a training step on a GPU does not wait. Observations may be
    numpy arrays or torch tensors; tensors on the network's device are best.
    """

    def __init__(self, model: SequentialInterface) -> None:
        """Update the outputs of ``model``, a `DDPSequential` or what `accelerate` returns."""
        if not isinstance(model, SequentialInterface):
            raise TypeError(
                "model must be a DDPSequential or what accelerate() returns, got a "
                f"{type(model).__name__}; pytagi's own OutputUpdater is for its own Sequential"
            )
        self._model = model

    def update(self, mu_obs: ArrayLike, var_obs: ArrayLike) -> None:
        """Update by observations of all outputs, [batch, outputs] or flat; NaN is no observation.

        ``mu_obs`` are their means, ``var_obs`` the variances of their noise: finite and not
        negative for each observation. Tensors on a GPU are not checked.
        """
        update_outputs(self._model._local, "update", {"mu_obs": mu_obs, "var_obs": var_obs})

    def update_using_indices(
        self, mu_obs: ArrayLike, var_obs: ArrayLike, selected_idx: ArrayLike
    ) -> None:
        """Update by observations of selected outputs, [batch, observations] or flat.

        ``selected_idx`` are the outputs' numbers, counted from 1, as for hierarchical softmax.
        """
        observations = {"mu_obs": mu_obs, "var_obs": var_obs, "selected_idx": selected_idx}
        update_outputs(self._model._local, "update_using_indices", observations)

    def update_heteros(self, mu_obs: ArrayLike) -> None:
        """Update by observations of unknown noise, [batch, outputs / 2] or flat.

        Outputs come in pairs: a value, and the expected variance of its noise. That is right for a
        network that ends in EvenExp, and not checked.
        """
        update_outputs(self._model._local, "update_heteros", {"mu_obs": mu_obs})


def update_outputs(
    local: LocalNetwork,
    method: UpdateMethod,
    observations: Mapping[str, ArrayLike],
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Compute the innovation of the last outputs, on their device.

    ``names`` are the names of the observations in errors. Raises RuntimeError before a forward,
    ValueError for numbers of observations, or variances, that do not fit.
    """
    compute = local.compute
    if local.accumulation.forwarded == 0 and not any(map(_size, observations.values())):
        return
    samples = compute.samples
    if samples == 0:
        raise RuntimeError(f"{method}() needs a forward() before it")
    outputs = compute.output_size
    arrays = {
        name: _numbers(value, compute.takes_tensors)
        if name == "selected_idx"
        else flat_floats(names.get(name, name), value, compute.takes_tensors)
        for name, value in observations.items()
    }
    sizes = {names.get(name, name): _size(array) for name, array in arrays.items()}
    _require_sizes(method, sizes, shape_of(observations["mu_obs"]), samples, outputs)
    selected = arrays.get("selected_idx")
    if isinstance(selected, np.ndarray) and not ((selected >= 1) & (selected <= outputs)).all():
        raise ValueError(
            f"selected_idx has numbers from {selected.min()} to {selected.max()}, but outputs are "
            f"numbered from 1 to {outputs}"
        )
    if "var_obs" in arrays:
        name = names.get("var_obs", "var_obs")
        require_variances(name, arrays["var_obs"], arrays["mu_obs"])
    compute.update_outputs(method, arrays)
    local.look_at_labels(arrays["mu_obs"], selected)


def _require_sizes(
    method: UpdateMethod,
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    samples: int,
    outputs: int,
) -> None:
    """Raise ValueError unless there are as many observations as the method takes.

    ``sizes`` are those of all arrays by their names in errors, first of the observations, whose
    shape is ``shape``.
    """
    (name, count), *others = sizes.items()
    each = {"update": outputs, "update_heteros": outputs // 2}.get(method, count // samples)
    if method == "update_heteros" and outputs % 2:
        raise ValueError(
            f"the noise of {name} is unknown, so outputs must be pairs of a value and the variance "
            f"of its noise, but there are {outputs}: give the noise's variance, or the network an "
            "even number of outputs"
        )
    if count != samples * each or not each:
        chosen = method == "update_using_indices"
        advice = f"give {'as many' if chosen else each} for each sample"
        if method == "update" and count == samples:
            advice += (
                f". Classes are given as rows of 0 and 1, numpy.eye({outputs})[labels]; or, for "
                "hierarchical softmax, by the observations and selected_idx that "
                "pytagi.Utils().label_to_obs(labels, classes) returns"
            )
        raise ValueError(
            f"{name} has {count} elements, but the outputs are [{samples}, {outputs}]: {advice}"
        )
    # Rows that are parts of samples are in order, too: the steps of series.
    in_order = len(shape) < 2 or shape[0] in (1, samples)
    if not in_order and (each % shape[-1] or shape[0] == each):
        raise ValueError(
            f"{name} has the shape {shape}, but there are {samples} samples: give an array of the "
            f"shape ({samples}, {each}), or a flat one"
        )
    for other, size in others:
        if size != count:
            single = ", or one number for all" if other.startswith("var_obs (") else ""
            raise ValueError(
                f"{other} has {size} elements, and {name} has {count}: give one for each{single}"
            )


def _numbers(value: ArrayLike, keep_tensors: bool) -> Any:
    """Return flat numbers of outputs as int32; kept tensors on a device stay as they are."""
    if keep_tensors and hasattr(value, "device") and str(value.device) != "cpu":
        return value
    return whole_numbers("selected_idx", value)


def _size(value: ArrayLike) -> int:
    if type(value) is np.ndarray:
        return value.size
    numel = getattr(value, "numel", None)
    return int(np.size(value) if numel is None else numel())
