"""The methods that DDPSequential shares with pytagi's Sequential."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tagi_ddp.checks import flat_floats, integer
from tagi_ddp.compute.computes import Compute
from tagi_ddp.compute.interface import LSTMStates
from tagi_ddp.compute.local_network import LocalNetwork
from tagi_ddp.engine.buffers import FloatArray, delta_states_of, empty_states, read_states
from tagi_ddp.engine.locks import new_lock, one_at_a_time
from tagi_ddp.replica import Replica
from tagi_ddp.replica.parameter_file import StateDict, statistics_of


class SequentialInterface:
    """pytagi's methods and properties that are not collective calls, on a `LocalNetwork`."""

    model: Any
    """The pytagi Sequential that is trained."""

    def __init__(self, local: LocalNetwork) -> None:
        """Show ``local`` as a Sequential."""
        self._local = local
        self._calls = new_lock(of_steps=True)  # of all methods that compute
        self.model = local.model

    @property
    def compute(self) -> Compute:
        """The compute of the last batch."""
        return self._local.compute

    @property
    def _replica(self) -> Replica:
        return self._local.replica

    @property
    def has_empty_share(self) -> bool:
        """True if the last `forward` had no samples."""
        return self._local.accumulation.forwarded == 0

    @one_at_a_time
    def train(self) -> None:
        """Set the network to training mode."""
        self.model.train()

    @one_at_a_time
    def eval(self) -> None:
        """Set the network to evaluation mode."""
        self.model.eval()

    @one_at_a_time
    def set_threads(self, num_threads: int) -> None:
        """Compute with this many threads; torch's are shared by the whole process."""
        self._local.computes.set_threads(integer("num_threads", num_threads, 1))

    def to_device(self, device: str) -> None:
        """Raise ValueError unless the replica lives on ``device`` already: it cannot be moved."""
        lives = self._replica.device
        if device not in (lives, lives.removesuffix(":0")):  # "cuda" is pytagi's first GPU
            raise ValueError(
                f"to_device() got {device!r}, but the replica lives on {lives}: "
                "choose by device= when the network is wrapped"
            )

    @one_at_a_time
    def get_outputs(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the last forward pass's outputs, each flat."""
        return self.compute.get_outputs()

    def output_to_host(self) -> None:
        """Copy the outputs from the device to the host; nothing to do on the CPU."""
        self.model.output_to_host()

    def get_device_with_index(self) -> str:
        """Return the device of the output buffers, for pytagi's OutputUpdater.

        It is "cpu:0", whatever device torch computes on.
        """
        return "cpu:0"

    @property
    @one_at_a_time
    def output_z_buffer(self) -> Any:
        """The output hidden states of the last forward pass; empty if that had no samples."""
        empty = self._local.accumulation.forwarded == 0
        return empty_states() if empty else self.compute.output_z_buffer

    @output_z_buffer.setter
    @one_at_a_time
    def output_z_buffer(self, value: Any) -> None:
        """Copy hidden states of the same number of outputs, for an output updater."""
        states = read_states(value) if hasattr(value, "mu_a") else None
        size = self.compute.samples * self.compute.output_size
        if states is None or states.mean.size != size or not size:
            raise ValueError(
                f"output_z_buffer takes hidden states of the {size} outputs of the last forward(), "
                f"got {'None' if states is None else states.mean.size}"
            )
        self.compute.set_outputs(states)

    @property
    @one_at_a_time
    def input_delta_z_buffer(self) -> Any:
        """The innovation of the outputs, from which backward starts."""
        return self.compute.input_delta_z_buffer

    @input_delta_z_buffer.setter
    @one_at_a_time
    def input_delta_z_buffer(self, value: Any) -> None:
        if not hasattr(value, "delta_mu"):
            raise ValueError(
                "input_delta_z_buffer takes an innovation like another network's "
                f"output_delta_z_buffer, got a {type(value).__name__}"
            )
        self.compute.input_delta_z_buffer = value

    @property
    @one_at_a_time
    def output_delta_z_buffer(self) -> Any:
        """The innovation of the last inputs, for the network that made them.

        It needs ``input_state_update``: RuntimeError without, unless the engine computes.
        """
        return self.compute.output_delta_z_buffer

    @one_at_a_time
    def set_delta_z(self, delta_mu: FloatArray, delta_var: FloatArray) -> None:
        """Set the innovation of the outputs: means and variances, each flat.

        ``input_delta_z_buffer`` shows these values, and `backward` raises ValueError unless there
        is one for each of the last outputs.
        """
        self._local.undo_misfit()
        expected = self.compute.samples * self.compute.output_size
        mean = flat_floats("delta_mu", delta_mu, False)
        variance = flat_floats("delta_var", delta_var, False)
        if mean.size == variance.size == expected:
            self.compute.set_delta_z(mean, variance)
            return
        name, size = (
            ("delta_mu", mean.size) if mean.size != expected else ("delta_var", variance.size)
        )
        text = f"{name} has {size} elements, not {expected}: give one for each output"
        if mean.size != variance.size or not expected:
            raise ValueError(text)
        self._local.misfit = text, self.input_delta_z_buffer
        self.input_delta_z_buffer = delta_states_of(mean, variance, 1)

    @property
    def input_state_update(self) -> bool:
        """True if backward computes the innovation of the inputs too."""
        return bool(self.model.input_state_update)

    @input_state_update.setter
    def input_state_update(self, value: bool) -> None:
        self.model.input_state_update = value

    @property
    def num_samples(self) -> int:
        """The number of samples that a smoother remembers."""
        return int(self.model.num_samples)

    @num_samples.setter
    def num_samples(self, value: int) -> None:
        self.model.num_samples = value

    @one_at_a_time
    def get_input_states(self) -> tuple[FloatArray, FloatArray]:
        """Return the innovation of the last inputs: means and variances, each flat."""
        return self.compute.get_input_states()

    @one_at_a_time
    def reset_lstm_states(self) -> None:
        """Reset the states of LSTM and SLSTM layers; the next step begins another series."""
        self.compute.reset_lstm_states()

    @one_at_a_time
    def get_lstm_states(self, time_step: int = -1) -> LSTMStates:
        """Return the states of LSTM layers, by the layer's index.

        Each entry holds means and variances of the outputs, then of the cells, flat. With a
        ``time_step`` from 0 on, SLSTM layers have the states of that step from `smoother`.
        """
        return self.compute.get_lstm_states(time_step)

    @one_at_a_time
    def set_lstm_states(self, states: LSTMStates) -> None:
        """Set the states of LSTM layers to those that `get_lstm_states` has returned.

        Empty arrays reset a layer; before the first `forward` nothing happens, as that resets all.

        Raises ValueError if ``states`` names another layer, or a part has another size.
        """
        now = self.compute.get_lstm_states()
        for index, parts in states.items():
            if index not in now:
                raise ValueError(f"states has layer {index}, but LSTM layers are {sorted(now)}")
            if len(parts) != len(now[index]):
                raise ValueError(
                    f"states[{index}] has {len(parts)} parts, not 4: means and variances of "
                    "outputs, then of cells"
                )
            sizes, expected = {len(np.ravel(part)) for part in parts}, len(now[index][0])
            if sizes != {0} and expected and sizes != {expected}:
                raise ValueError(
                    f"states[{index}] has parts of {sorted(sizes)} elements, not {expected}: give "
                    "the states of as many samples as the last forward() had"
                )
        if any(len(parts[0]) for parts in now.values()):
            self.compute.set_lstm_states(states)

    @one_at_a_time
    def smoother(self) -> tuple[FloatArray, FloatArray]:
        """Smooth the series since the last call, of ``num_samples`` steps, backwards in time.

        Returns means and variances of its outputs, num_samples floats each.
        """
        return self.compute.smoother()

    @one_at_a_time
    def get_outputs_smoother(self) -> tuple[FloatArray, FloatArray]:
        """Return means and variances of the outputs of the last `smoother`."""
        return self.compute.get_outputs_smoother()

    @one_at_a_time
    def state_dict(self) -> dict[str, Any]:
        """Return the parameters by layer: (mu_w, var_w, mu_b, var_b).

        The dict also holds running statistics for `load_state_dict`; a copy by ``dict()``, or a
        dict of pytagi's own, does not.
        """
        self._replica.pull()
        self._replica.export()
        state = StateDict(self.model.state_dict())
        statistics = statistics_of(self._replica.state())
        state.statistics = {
            name: [array.copy() for array in arrays] for name, arrays in statistics.items()
        }
        return state

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
