"""Checks for pytagi's OutputUpdater, which with a wrong size would train on foreign memory.

The engine's `update` ignores missing observations, NaN; its other methods would use them.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tagi_ddp._backend import update_states
from tagi_ddp.checks import flat_floats, require_variances, whole_numbers
from tagi_ddp.engine.buffers import count_of


@functools.cache  # The engine is changed once in a process.
def check_sizes_of_updates() -> None:
    """Make every OutputUpdater of pytagi raise if an argument does not fit the outputs.

    The errors name the argument. Scripts call an OutputUpdater directly, so no other code checks.
    """
    from pytagi.nn import OutputUpdater

    originals = {
        name: getattr(OutputUpdater, name)
        for name in ("__init__", "update", "update_using_indices", "update_heteros")
    }

    def initialise(self: Any, model_device: str) -> None:
        originals["__init__"](self, model_device)
        self._model_device = model_device

    def update(self: Any, output_states: Any, mu_obs: Any, var_obs: Any, delta_states: Any) -> None:
        # The most frequent case takes microseconds: our buffers have their addresses.
        states = getattr(output_states, "address", None)
        deltas = getattr(delta_states, "address", None)
        plain = type(mu_obs) is type(var_obs) is np.ndarray  # no masked arrays
        if states is not None and deltas is not None and plain:
            try:
                if update_states(states, mu_obs, var_obs, deltas):
                    return
            except TypeError:  # The backend cannot use the arrays as they are.
                pass
        mu, var = flat_floats("mu_obs", mu_obs, False), flat_floats("var_obs", var_obs, False)
        if _empty_share(output_states, mu, var):
            return
        outputs, _ = _outputs(output_states, delta_states)
        _require("mu_obs", mu, outputs, "one for each output")
        _require("var_obs", var, outputs, "one for each output")
        require_variances("var_obs", var, mu)
        originals["update"](self, output_states, mu, var, delta_states)

    def update_using_indices(
        self: Any,
        output_states: Any,
        mu_obs: ArrayLike,
        var_obs: ArrayLike,
        selected_idx: ArrayLike,
        delta_states: Any,
    ) -> None:
        mu, var = flat_floats("mu_obs", mu_obs, False), flat_floats("var_obs", var_obs, False)
        chosen = whole_numbers("selected_idx", selected_idx)
        if _empty_share(output_states, mu, var, chosen):
            return
        _, width = _outputs(output_states, delta_states)
        batch = output_states.block_size
        if not chosen.size or chosen.size % batch:
            raise ValueError(
                f"selected_idx has {chosen.size} elements, no multiple of the {batch} samples"
            )
        _require("mu_obs", mu, chosen.size, "one for each of selected_idx")
        _require("var_obs", var, chosen.size, "one for each of selected_idx")
        require_variances("var_obs", var, mu)
        if chosen.min() < 1 or chosen.max() > width:
            raise ValueError(
                f"selected_idx has numbers from {chosen.min()} to {chosen.max()}, but outputs "
                f"are numbered from 1 to {width}"
            )
        # An updater reuses the sizes of its last call if that had as many observations.
        device = getattr(self, "_model_device", self.device)
        self._cpp_backend = type(self._cpp_backend)(device)
        missing = np.isnan(mu)
        mu, var = np.where(missing, 0, mu), np.where(missing, np.inf, var)
        method = originals["update_using_indices"]
        method(self, output_states, mu, var, chosen, delta_states)

    def update_heteros(self: Any, output_states: Any, mu_obs: ArrayLike, delta_states: Any) -> None:
        mu = flat_floats("mu_obs", mu_obs, False)
        if _empty_share(output_states, mu):
            return
        outputs, width = _outputs(output_states, delta_states)
        if width % 2:
            raise ValueError(f"outputs must be pairs of value and noise, got {width} outputs")
        _require("mu_obs", mu, outputs // 2, "one for each two outputs")
        missing = ~np.isfinite(mu)
        method = originals["update_heteros"]
        method(self, output_states, np.where(missing, 0, mu), delta_states)
        if missing.any():
            pairs = np.flatnonzero(np.repeat(missing, 2))
            for name in ("delta_mu", "delta_var"):
                values = np.array(getattr(delta_states, name), np.float32)
                values[pairs] = 0
                setattr(delta_states, name, values.tolist())

    OutputUpdater.__init__ = initialise
    OutputUpdater.update = update
    OutputUpdater.update_using_indices = update_using_indices
    OutputUpdater.update_heteros = update_heteros


def _count(states: Any) -> int:
    return 0 if states is None else count_of(states)


def _empty_share(states: Any, *observations: NDArray[Any]) -> bool:
    """Return True if there are no outputs and no observations, as on a rank without samples."""
    return not _count(states) and not any(array.size for array in observations)


def _outputs(states: Any, deltas: Any) -> tuple[int, int]:
    """Return the number of outputs of the batch, and of a sample."""
    outputs = _count(states)
    if not outputs:
        raise RuntimeError("output_states is empty: an update needs a forward() before it")
    if deltas.size < outputs:
        raise ValueError(
            f"delta_states has room for {deltas.size} of {outputs} outputs: give the "
            "input_delta_z_buffer of the model that output_states is of"
        )
    return outputs, outputs // states.block_size


def _require(name: str, array: NDArray[Any], count: int, what: str) -> None:
    if array.size != count:
        raise ValueError(f"{name} has {array.size} elements, not {count}: give {what}")
