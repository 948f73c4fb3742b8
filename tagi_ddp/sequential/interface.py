"""The methods that DDPSequential shares with pytagi's Sequential, and those for merging."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np

from tagi_ddp.checks import flat_floats, integer
from tagi_ddp.compute import Compute, ComputeByBatch, LSTMStates
from tagi_ddp.engine.buffers import FloatArray, delta_states_of, empty_states, read_states
from tagi_ddp.engine.threads import one_at_a_time
from tagi_ddp.replica.parameter_file import StateDict, statistics_of
from tagi_ddp.replica.protocol import Replica
from tagi_ddp.sequential.wrapped import WrappedNetwork
from tagi_ddp.update.exchange import Exchange
from tagi_ddp.update.merging import Merging, ScheduledMerging
from tagi_ddp.update.micro_batches import Accumulation

M = TypeVar("M", bound=Merging)


class SequentialInterface(WrappedNetwork):
    """pytagi's methods and properties that are not collective calls, for any compute."""

    compute: Compute
    _calls: AbstractContextManager[Any]  # the lock of all methods that compute
    _by_batch: ComputeByBatch | None = None  # chooses ``compute`` for each batch
    _accumulation: Accumulation
    _misfit: tuple[str, Any] | None = None  # set_delta_z's error; the buffer before

    @property
    def has_empty_share(self) -> bool:
        """True if the last `forward` had no samples."""
        return self._accumulation.forwarded == 0

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
        (self._by_batch or self.compute).set_threads(integer("num_threads", num_threads, 1))

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
        empty = self._accumulation.forwarded == 0
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
        self._undo_misfit()
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
        self._misfit = text, self.input_delta_z_buffer
        self.input_delta_z_buffer = delta_states_of(mean, variance, 1)

    def _undo_misfit(self) -> None:
        """Restore the buffer that was replaced by one of another size."""
        if self._misfit is not None:
            self.input_delta_z_buffer, self._misfit = self._misfit[1], None

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


class MergeInterface:
    """The methods for ``reduction="precision"``, and the counters of irregular updates."""

    _calls: AbstractContextManager[Any]
    _exchange: Exchange
    _replica: Replica
    _or_abort: Callable[[], AbstractContextManager[None]]
    _together: Callable[[Callable[[], object]], None]

    @one_at_a_time
    def merge(self) -> None:
        """Merge the posteriors of all ranks now; a collective call, for ``reduction="precision"``.

        With the precisions l = 1 / variance and the prior (mu0, l0) that all R ranks had after the
        last merge, the result is::

            l = l0 + sum (l_r - l0) / (1 + (R - 1) c_l)
            mu = mu0 + sum l_r (mu_r - mu0) / (1 + (R - 1) c_w) / l

        With merge="bayes", c_l and c_w are 0. With merge="agreement" they are between 0 and 1, and
        higher if ranks have learned more alike; sums that overshoot are damped (docs/merging.md).

        No sample counts twice, however many steps lie between two merges. A parameter whose
        precision would fall below a tenth takes half of the merge, or a quarter, and so on;
        `get_partial_merge_counter` counts these.

        Raises NotFiniteError on all ranks if a step of any was refused since the last merge.
        """
        with self._or_abort():
            self._together(self._merging("merge", Merging).merge)

    def local_batches(self, share: Any, size: int) -> Iterator[Any]:
        """Yield the parts of this rank's share of a batch, each for a step of its own.

        ``for part in model.local_batches(share, 32): model.learn(x[part], y[part], noise)``.
        ``sync_every`` and a schedule count the whole share as one step. Several small steps between
        two merges let a large global batch keep the quality of small ones.

        Args:
            share: a sequence, like the indices from `DistributedSampler`; its length may differ
                between ranks.
            size: the length of the parts; the last one may be shorter.

        Raises:
            RuntimeError: posteriors are not merged: it needs ``reduction="precision"``.
            TypeError, ValueError: ``size`` is no integer of 1 or more.
        """
        with self._or_abort():
            merging = self._merging("local_batches", Merging)
            size = integer("size", size, 1)
        with merging.local_steps():
            for first in range(0, len(share), size):
                yield share[first : first + size]
        with self._or_abort():
            self._together(merging.end_share)

    @one_at_a_time
    def begin_epoch(self, batches: int) -> None:
        """Begin an epoch of the schedule with this many steps, the same number on all ranks."""
        with self._or_abort():
            self._merging("begin_epoch", ScheduledMerging).begin_epoch(batches)

    @one_at_a_time
    def end_epoch(self, loss: float) -> float:
        """Merge the remaining steps, give the schedule the ranks' mean loss, and return that mean.

        A collective call. Raises ValueError on all ranks if a loss is NaN or infinite.
        """
        with self._or_abort():
            return self._merging("end_epoch", ScheduledMerging).end_epoch(loss)

    @property
    def unmerged_steps(self) -> int:
        """The number of steps since the ranks were equal; 0 if each step makes them equal."""
        return self._exchange.steps

    def get_partial_merge_counter(self) -> dict[str, int]:
        """Return how many parameters of each layer have taken only a part of a merge so far.

        The keys are the engine's descriptions of the layers, as in `get_neg_var_w_counter`.
        """
        return self._by_layer(self._merging("get_partial_merge_counter", Merging).guarded)

    def get_merge_agreement(self) -> dict[str, float]:
        """Return by layer how much alike ranks, or nodes, had learned before the last merge.

        It is from 0, orthogonal changes, to 1, equal ones; 0 with merge="bayes". The keys are the
        engine's descriptions of the layers; layers with the same one have their mean.
        """
        found: dict[str, list[float]] = {}
        numbers = self._merging("get_merge_agreement", Merging).agreement
        for layer, number in zip(self._replica.layers, numbers, strict=True):
            found.setdefault(layer.handle.get_layer_info(), []).append(number)
        return {name: sum(values) / len(values) for name, values in found.items()}

    def get_neg_var_w_counter(self) -> dict[str, int]:
        """Return how many variances of each layer's weights the last step found not positive.

        The keys are the engine's descriptions of the layers, as in pytagi, also inside of blocks;
        layers with the same one are added up.
        """
        return self._by_layer(self._replica.parameters.negative_variances)

    def _merging(self, method: str, kind: type[M]) -> M:
        if isinstance(self._exchange, kind):
            return self._exchange
        needs = 'reduction="precision"' + ", sync_every=SyncSchedule(...)" * (kind is not Merging)
        raise RuntimeError(f"{method}() needs DDPSequential(..., {needs})")

    def _by_layer(self, numbers: Iterable[int]) -> dict[str, int]:
        """Return the sums of numbers by the engine's description of the layer."""
        counts: dict[str, int] = {}
        for layer, number in zip(self._replica.layers, numbers, strict=True):
            name = layer.handle.get_layer_info()
            counts[name] = counts.get(name, 0) + number
        return counts
