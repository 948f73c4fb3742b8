"""The engine as the oracle: the same layers, parameters and inputs, computed by all."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tagi_ddp.compute import native
from tagi_ddp.compute.network import Network
from tagi_ddp.compute.states import Deltas
from tagi_ddp.engine.buffers import count_of, delta_states_of
from tagi_ddp.engine.layers import DELTAS
from tagi_ddp.engine.pointers import address_of
from tagi_ddp.engine.shapes import input_rows
from tagi_ddp.replica.host import attach

BIAS_TOLERANCE = 1e-4  # the engine's order of summation costs it digits
TOLERANCE = 1e-5
# Over their number squared: a few sums may all be small beside what they sum, and lose digits.
FEW_TOLERANCE = 1e-3
ROUNDINGS = 4  # of several additions


@dataclass
class Results:
    """The arrays that one forward and backward give, by name."""

    arrays: dict[str, np.ndarray]

    def assert_close(
        self,
        other: Results,
        tolerance: float = TOLERANCE,
        rounding: Callable[[], dict[str, float]] | None = None,
    ) -> None:
        """Compare by relative norm, or by what `Both.rounding` returns."""
        assert self.arrays.keys() == other.arrays.keys()
        for name, ours in self.arrays.items():
            theirs = other.arrays[name]
            assert ours.shape == theirs.shape, name
            allowed = BIAS_TOLERANCE if name.endswith("_b") else tolerance
            if rounding is None:
                sums = np.count_nonzero(theirs)  # of an embedding a batch touches some rows only
                allowed = max(allowed, FEW_TOLERANCE / max(1, sums) ** 2)
            distance = np.linalg.norm(ours - theirs)
            if distance > allowed * np.linalg.norm(theirs) + 1e-30:
                # A sum that cancels is off by roundings of its terms, which are larger than it.
                terms = rounding()[name] if rounding else 0.0
                assert distance <= ROUNDINGS * terms, (
                    f"{name}: off by {distance / max(np.linalg.norm(theirs), 1e-30):.2g}"
                )


class Both:
    """One network of ``layers``, computed by the engine, by torch and natively from one state.

    ``native`` is None where the backend has no kernels for a layer, or none for its place.
    ``kernels``: whether Linear layers of torch's are computed by the backend's, in small batches.
    """

    def __init__(self, *layers: Any, threads: int = 1, kernels: bool = False) -> None:
        import pytagi.nn as nn

        self.model = nn.Sequential(*layers)
        self.model.set_threads(threads)
        self.replica = attach(self.model)
        self.deltas = torch.zeros(2 * self.replica.parameters.size)
        if kernels:
            self.replica.on_host.place_deltas(self.deltas.numpy())
        self.network = Network(self.model, self.replica, self.deltas, kernels=kernels)
        try:
            layers = self.model._cpp_backend.layers
            self.native = native.build(layers, self.replica, input_rows(self.model))
        except ValueError:
            self.native = None

    def engine(
        self, mean: np.ndarray, variance: np.ndarray | None, innovation: np.ndarray | None
    ) -> Results:
        """Forward; then backward from ``innovation`` of outputs, [2, batch * outputs]."""
        batch = len(mean)
        rows = input_rows(self.model)
        shape = (batch, rows, -1) if rows > 1 else (-1,)
        spread = None if variance is None else variance.reshape(shape)
        self.model.forward(mean.reshape(shape), spread)
        states = self.model.output_z_buffer
        size = count_of(states)
        arrays = {
            "outputs' means": np.array(states.mu_a[:size], np.float32),
            "outputs' variances": np.array(states.var_a[:size], np.float32),
            "outputs' jacobians": np.array(states.jcb[:size], np.float32),
        }
        if innovation is not None:
            self.model.set_delta_z(innovation[0], innovation[1])
            self.model.backward()
            arrays |= self._deltas()
        return Results(arrays)

    def natively(
        self, mean: np.ndarray, variance: np.ndarray | None, innovation: np.ndarray | None
    ) -> Results:
        """Do the same by the backend's kernels."""
        network = self.native
        assert network is not None
        self.replica.pull()
        engines = self._deltas()
        outputs = np.empty((2, len(mean) * network.output_size), np.float32)
        network.forward(mean, variance, None, innovation is not None, *outputs)
        import cutagi

        states = cutagi.BaseHiddenStates(outputs[0].size, len(mean))
        network.show_outputs(address_of(states, "BaseHiddenStates"))
        for ours, shown in zip(outputs, (states.mu_a, states.var_a), strict=True):
            np.testing.assert_array_equal(ours, shown)
        arrays = {
            "outputs' means": outputs[0],
            "outputs' variances": outputs[1],
            "outputs' jacobians": np.array(states.jcb, np.float32),
        }
        if innovation is not None:
            given = delta_states_of(innovation[0].ravel(), innovation[1].ravel(), len(mean))
            network.take_innovation(address_of(given, "BaseDeltaStates"))
            network.backward(False)
            arrays |= self._deltas()
            self._set_deltas(engines)
        return Results(arrays)

    def _deltas(self) -> dict[str, np.ndarray]:
        """Return the deltas in the engine's layers by name."""
        return {
            f"{layer.name} {name}": np.array(getattr(layer.handle, name), np.float32)
            for layer in self.replica.layers
            for name in DELTAS[: 4 if layer.handle.bias else 2]
        }

    def _set_deltas(self, arrays: dict[str, np.ndarray]) -> None:
        for layer in self.replica.layers:
            for name in DELTAS:
                if (array := arrays.get(f"{layer.name} {name}")) is not None:
                    setattr(layer.handle, name, array.tolist())

    def rounding(
        self, mean: np.ndarray, variance: np.ndarray | None, innovation: np.ndarray | None
    ) -> dict[str, float]:
        """Return how far, by norm, arrays of `torch` move if the inputs change by a rounding."""
        rng = np.random.default_rng(0)
        saved = [(array, array.copy()) for _, array in self.replica.state()]

        def nudged(array: np.ndarray | None) -> np.ndarray | None:
            ends = np.float32([-np.inf, np.inf])
            return None if array is None else np.nextafter(array, rng.choice(ends, array.shape))

        def results(*inputs: np.ndarray | None) -> dict[str, np.ndarray]:
            _restore(saved)
            return self.torch(*inputs).arrays  # type: ignore[arg-type]

        exact = results(mean, variance, innovation)
        others = [results(*map(nudged, (mean, variance, innovation))) for _ in range(4)]
        _restore(saved)
        return {
            name: max(float(np.linalg.norm(other[name] - array)) for other in others)
            for name, array in exact.items()
        }

    def torch(
        self, mean: np.ndarray, variance: np.ndarray | None, innovation: np.ndarray | None
    ) -> Results:
        """Do the same on torch."""
        tensors = [None if a is None else torch.from_numpy(a.copy()) for a in (mean, variance)]
        before = [None if t is None else t.clone() for t in tensors]
        states = self.network.forward(*tensors, training=innovation is not None)
        jacobian = states.jacobian
        arrays = {
            "outputs' means": states.mean.reshape(-1).numpy().copy(),
            "outputs' variances": _array(states.variance, states.mean),
            "outputs' jacobians": (
                np.ones(states.mean.numel(), np.float32)
                if jacobian is None
                else jacobian.tensor().reshape(-1).numpy().copy()
            ),
        }
        if innovation is not None:
            shape = states.mean.shape
            deltas = [torch.from_numpy(part.copy()).reshape(shape) for part in innovation]
            self.network.backward(Deltas(*deltas))
            for old, new in zip(before, tensors, strict=True):
                assert old is None or torch.equal(old, new), "an input was changed"
            flat = self.deltas.numpy().reshape(2, -1)
            blocks = iter(self.replica.parameters.blocks)
            for layer in self.replica.layers:
                for kind in ("w", "b"):
                    offset, count = next(blocks)
                    if kind == "w" or layer.handle.bias:
                        for row, part in enumerate(("mu", "var")):
                            array = flat[row, offset : offset + count].copy()
                            arrays[f"{layer.name} delta_{part}_{kind}"] = array
        return Results(arrays)


def compare(
    make: Callable[[], list[Any]],
    inputs: int,
    batch: int,
    seed: int = 0,
    exact: bool = False,
    tolerance: float = TOLERANCE,
) -> None:
    """Build layers with ``make``; check outputs, jacobians and deltas of a random batch.

    ``exact`` inputs have no variance. Both start from the parameters that the engine has drawn.
    """
    import pytagi

    rng = np.random.default_rng(seed)
    pytagi.manual_seed(seed % 2**31)
    both = Both(*make())
    mean = rng.standard_normal((batch, inputs)).astype(np.float32)
    variance = None if exact else rng.uniform(0.1, 1, (batch, inputs)).astype(np.float32)
    # The engine's forward may change its state (running statistics): compute ours first, on its
    # state, and give the state back before the engine's turn.
    saved = [(array, array.copy()) for _, array in both.replica.state()]
    outputs = both.network.forward(
        torch.from_numpy(mean.copy()),
        None if variance is None else torch.from_numpy(variance.copy()),
        training=False,
    ).mean.numel()
    innovation = np.stack([rng.standard_normal(outputs), -rng.uniform(0.01, 1, outputs)]).astype(
        np.float32
    )
    _restore(saved)
    ours = [both.torch(mean, variance, innovation)]
    if both.native is not None:
        ours.append(both.natively(mean, variance, innovation))
    pytagi.manual_seed(seed % 2**31)
    ours.append(Both(*make(), kernels=True).torch(mean, variance, innovation))
    state = copy.deepcopy([array for array, _ in saved])
    _restore(saved)
    theirs = both.engine(mean, variance, innovation)
    for (now, _), then in zip(saved, state, strict=True):
        np.testing.assert_allclose(then, now, rtol=1e-4, atol=1e-6, err_msg="state")
    _restore(saved)
    for results in ours:
        results.assert_close(theirs, tolerance, lambda: both.rounding(mean, variance, innovation))


def _restore(saved: list[tuple[np.ndarray, np.ndarray]]) -> None:
    for array, values in saved:
        array[...] = values


def _array(tensor: torch.Tensor | None, like: torch.Tensor) -> np.ndarray:
    if tensor is None:
        return np.zeros(like.numel(), np.float32)
    return tensor.reshape(-1).numpy().copy()
