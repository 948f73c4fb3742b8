"""The innovation of a network's outputs from observations, where the outputs are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tagi_ddp.sequential.interface import SequentialInterface

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike


class OutputUpdater:
    """pytagi's OutputUpdater for one network, without a way over the host.

    pytagi's own goes on working. This one reads the outputs of the last forward pass on their
    device and leaves the innovation there, so that a training step on a GPU does not wait.
    Observations may be numpy arrays or torch tensors; tensors on the network's device are best.
    """

    def __init__(self, model: SequentialInterface) -> None:
        """Update the outputs of ``model``, a `DDPSequential` or what `accelerate` returns."""
        if not isinstance(model, SequentialInterface):
            raise TypeError(
                "model must be a DDPSequential or what accelerate() returns, got a "
                f"{type(model).__name__}; pytagi's own OutputUpdater is for its own Sequential"
            )
        self._model = model
        self._engine: Any = None

    def update(self, mu_obs: ArrayLike, var_obs: ArrayLike) -> None:
        """Take observations of all outputs, [batch, outputs] or flat; NaN is no observation.

        ``mu_obs`` are their means, ``var_obs`` the variances of their noise.
        """
        self._update("update", {"mu_obs": mu_obs, "var_obs": var_obs})

    def update_using_indices(
        self, mu_obs: ArrayLike, var_obs: ArrayLike, selected_idx: ArrayLike
    ) -> None:
        """Take observations of selected outputs, [batch, observations] or flat.

        ``selected_idx`` are the outputs' numbers, counted from 1, as hierarchical softmax gives.
        """
        observations = {"mu_obs": mu_obs, "var_obs": var_obs, "selected_idx": selected_idx}
        self._update("update_using_indices", observations)

    def update_heteros(self, mu_obs: ArrayLike) -> None:
        """Take observations, [batch, outputs / 2] or flat, of unknown noise.

        Outputs come in pairs: a value, and the expected variance of its noise.
        """
        self._update("update_heteros", {"mu_obs": mu_obs})

    def _update(self, method: str, observations: dict[str, ArrayLike]) -> None:
        compute = self._model.compute
        if self._model.has_empty_share and not any(map(_size, observations.values())):
            return
        samples = compute.samples
        if samples == 0:
            raise RuntimeError(f"{method}() needs a forward() before it")
        outputs = compute.output_size
        counts = {name: _size(value) for name, value in observations.items()}
        count = counts["mu_obs"]
        expected = {"update": samples * outputs, "update_heteros": samples * outputs // 2}
        if (
            count != expected.get(method, count)
            or count % samples
            or set(counts.values()) != {count}
        ):
            raise ValueError(
                f"{method}() got {counts} elements for {samples} samples of {outputs} outputs; "
                "give one for each observed output, and in all arrays as many"
            )
        if compute.name == "torch":
            self._update_on_torch(method, observations)
        else:
            self._update_on_engine(method, observations)

    def _update_on_torch(self, method: str, observations: dict[str, ArrayLike]) -> None:
        from tagi_ddp.compute import innovation as formulas

        compute: Any = self._model.compute
        states = compute.states
        arrays = [_tensor(value, states.mean) for value in observations.values()]
        formula = {
            "update": formulas.innovation,
            "update_using_indices": formulas.selected_innovation,
            "update_heteros": formulas.heteroscedastic_innovation,
        }[method]
        compute.innovation = formula(states, *arrays)

    def _update_on_engine(self, method: str, observations: dict[str, ArrayLike]) -> None:
        from pytagi.nn import OutputUpdater as EngineUpdater

        if self._engine is None:
            self._engine = EngineUpdater(self._model.get_device_with_index())
        arrays = {name: np.asarray(value).reshape(-1) for name, value in observations.items()}
        getattr(self._engine, method)(
            output_states=self._model.output_z_buffer,
            delta_states=self._model.input_delta_z_buffer,
            **arrays,
        )


def _size(value: ArrayLike) -> int:
    numel = getattr(value, "numel", None)
    return int(np.size(value) if numel is None else numel())


def _tensor(value: ArrayLike, like: torch.Tensor) -> torch.Tensor:
    import torch

    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.asarray(value))
    dtype = tensor.dtype if tensor.dtype in (torch.int32, torch.int64) else like.dtype
    return tensor.to(like.device, dtype, non_blocking=True)
