"""The attributes that DDPSequential has from the wrapped network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tagi_ddp.replica.protocol import Replica


class WrappedNetwork:
    """The network's own attributes that need no code here, with the replica's parameters."""

    model: Any
    """The pytagi Sequential that is trained."""
    _replica: Replica

    if TYPE_CHECKING:  # Type checkers and the reference know only these names.
        layers: list[Any]
        """The engine's layers, in order."""
        device: str
        """The device of the engine's own kernels: "cpu", or "cuda:" with a number."""
        z_buffer_size: int
        """The size of the engine's own hidden states."""
        z_buffer_block_size: int
        """The batch size for which the engine's own hidden states were allocated."""

        def get_layer_stack_info(self) -> str:
            """Return the engine's descriptions of the layers, a line each."""

        def parameters(self) -> list[tuple[list[float], ...]]:
            """Return the parameters by layer: (mu_w, var_w, mu_b, var_b), each flat."""

        def get_norm_mean_var(self) -> dict[str, Any]:
            """Return, by normalization layer, the statistics of a batch and the running ones."""

        def save_csv(self, filename: str) -> None:
            """Write the parameters to CSV files, as the engine does."""

        def preinit_layer(self) -> None:
            """Initialize the engine's layers that wait for the first `forward`."""

        def params_to_device(self) -> None:
            """Copy the engine's own parameters to its device; nothing to do on the CPU."""

        def params_to_host(self) -> None:
            """Copy the engine's own parameters to the host; nothing to do on the CPU."""

        def delta_z_to_host(self) -> list[float] | None:
            """Return the engine's own innovation of the inputs, copied to the host."""

    else:

        def __getattr__(self, name: str) -> Any:
            """Return an attribute that only the model has."""
            if name.startswith("_") or name in ("model", "compute"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._replica.export()
            return getattr(self.model, name)
