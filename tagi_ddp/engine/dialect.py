"""The mathematics in which engines differ, found by tests of the engine that is there.

Upstream has changed some formulas, and engines that people build have the wheel's version number
all the same. So each is looked at once in a process, by a small network and the public interface.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tagi_ddp._backend import CAP_FACTORS, cap_factor
from tagi_ddp.engine.loader import load_engine


class DialectError(ValueError):
    """The engine computes by a formula that this package does not know."""


@dataclass(frozen=True)
class Dialect:
    """The formulas of an engine.

    exp_covariance: the jacobian of EvenExp is the covariance of z and exp(z), as in pytagi 0.2.1;
    later it is the mean of exp(z). sequences: an LSTM carries its states from step to step of a
    sample, and other layers see each step as a row of its own. free_rms_norm: the cap factor of
    RMSNorm is 1 for batches of all sizes.
    """

    exp_covariance: bool
    sequences: bool
    free_rms_norm: bool

    def __str__(self) -> str:
        """Return the formulas in words."""
        slope = "the covariance of z and exp(z)" if self.exp_covariance else "the mean of exp(z)"
        steps = "carry their states" if self.sequences else "do not carry their states"
        text = f"EvenExp's jacobian is {slope}; LSTMs {steps} from step to step of a sample"
        return f"{text}; RMSNorm's cap factor is 1" if self.free_rms_norm else text


@functools.cache
def dialect() -> Dialect:
    """Return the dialect of the engine that is there; raise DialectError if it is not known."""
    load_engine()
    return Dialect(_exp_covariance(), _has_sequences(), _frees_rms_norm())


@functools.cache
def check_step() -> None:
    """Raise DialectError unless the engine's step is the one that this package makes.

    It moves a mean or a variance by its delta, at most by sqrt(variance) / cap factor, and leaves
    all others as they are.
    """
    load_engine()
    import cutagi

    edges = {edge for batch, _ in CAP_FACTORS for edge in (batch - 1, batch)}
    for batch in sorted({1, 1024, *edges} - {-1, 0}):
        linear = make_layer(cutagi.Linear(0, 0, True), 1, 2, 2, 2)
        found, as_expected = _cap_of(cutagi.Sequential([linear]), linear, batch)
        if not math.isclose(found, cap_factor(batch), rel_tol=1e-3):
            raise DialectError(
                f"the engine's cap factor for a batch of {batch} is {found:g}, not "
                f"{cap_factor(batch):g}: this package would make other steps. Train by the engine "
                "alone, or build an older one"
            )
        if not as_expected:
            raise DialectError(
                "the engine's step moves parameters by more or less than their deltas, which this "
                "package would not do. Train by the engine alone, or build an older one"
            )


def make_layer(layer: Any, inputs: int, outputs: int, weights: int, biases: int) -> Any:
    """Give a layer of no inputs and outputs these sizes, and all parameters 0.5.

    A layer that is made with weights draws them from the engine's generator: the numbers that a
    user's network gets would change.
    """
    layer.input_size, layer.output_size = inputs, outputs
    layer.num_weights, layer.num_biases = weights, biases
    for part, count in (("w", weights), ("b", biases)):
        for name, value in (("mu", 0.5), ("var", 0.5), ("delta_mu", 0.0), ("delta_var", 0.0)):
            setattr(layer, f"{name}_{part}", [value] * count)
    return layer


def _cap_of(network: Any, layer: Any, batch: int) -> tuple[float, bool]:
    """Return the cap factor of a layer of 2 weights, and whether all else moves by its delta."""
    network.forward(np.full((batch, 1), 0.5, np.float32), None)
    layer.mu_w, layer.var_w = [0.5, 0.5], [0.25, 0.25]
    layer.delta_mu_w, layer.delta_var_w = [1e6, 0.0], [0.0, 0.125]
    biases = list(layer.mu_b), list(layer.var_b)
    network.step()
    (moved, stayed), variances = layer.mu_w, list(layer.var_w)
    as_expected = stayed == 0.5 and variances == [0.25, 0.375]
    return 0.5 / (moved - 0.5), as_expected and (list(layer.mu_b), list(layer.var_b)) == biases


def _exp_covariance() -> bool:
    import cutagi

    linear = make_layer(cutagi.Linear(0, 0, True), 1, 2, 2, 2)
    network = cutagi.Sequential([linear, cutagi.EvenExp()])
    linear.mu_w, linear.var_w = [0.0, 0.5], [0.1, 0.25]
    linear.mu_b, linear.var_b = [0.0, 0.0], [0.1, 0.25]
    network.forward(np.ones((1, 1), np.float32), None)
    found = float(network.output_z_buffer.jcb[1])
    mean, variance = math.exp(0.75), 0.5
    for covariance, expected in ((True, variance * mean), (False, mean)):
        if math.isclose(found, expected, rel_tol=1e-4):
            return covariance
    raise DialectError(
        f"the engine's EvenExp has the jacobian {found:g} for N(0.5, 0.5), which is not known"
    )


def _has_sequences() -> bool:
    import cutagi

    lstm = make_layer(cutagi.LSTM(0, 0, seq_len=2, bias=True), 1, 1, 8, 4)
    network = cutagi.Sequential([lstm])
    network.forward(np.ones((1, 2, 1), np.float32), None)
    first, second = network.output_z_buffer.mu_a[:2]
    return not math.isclose(first, second, rel_tol=1e-4)


@functools.cache
def softmax_works() -> bool:
    """Return False if the engine's Softmax reaches other elements than those of the batch.

    In engines with sequences it writes as many as the square of the batch size.
    """
    load_engine()
    import cutagi

    linear = make_layer(cutagi.Linear(0, 0, True), 1, 5, 5, 5)
    network = cutagi.Sequential([linear, cutagi.Softmax()])
    network.forward(np.ones((2, 1), np.float32), None)
    return math.isclose(sum(network.output_z_buffer.mu_a[:10]), 5, rel_tol=1e-4)


@functools.cache
def learns_from_all_steps() -> bool:
    """Return False if layers that see each step alone learn from the first steps only.

    In engines with sequences the backward pass does not know how many steps a sample has; those of
    LSTM and Embedding do without.
    """
    load_engine()
    import cutagi

    linear = make_layer(cutagi.Linear(0, 0, True), 1, 1, 1, 1)
    network = cutagi.Sequential([linear])
    network.forward(np.ones((1, 2, 1), np.float32), None)
    network.set_delta_z(np.array([0, 1], np.float32), np.array([0, -1], np.float32))
    network.backward()
    return bool(linear.delta_mu_b[0] != 0)


@functools.cache
def passes_steps_on(kind: str) -> bool:
    """Return whether an activation passes on how many steps a sample has.

    In engines with sequences some leave the number of another layer, which used the memory before.
    """
    load_engine()
    import cutagi

    if not hasattr(cutagi, kind):
        return True
    first, last = (cutagi.LSTM(0, 0, last_timestep=last, seq_len=3, bias=True) for last in (0, 1))
    layers = [make_layer(first, 1, 2, 24, 8), make_layer(last, 2, 2, 32, 8)]
    network = cutagi.Sequential([*layers, getattr(cutagi, kind)()])
    network.forward(np.ones((2, 3, 1), np.float32), None)
    return len(network.get_outputs()[0]) == 2 * 2


def _frees_rms_norm() -> bool:
    import cutagi

    if not hasattr(cutagi, "RMSNorm"):
        return False
    norm = cutagi.RMSNorm([2], 1e-5)
    linear = make_layer(cutagi.Linear(0, 0, True), 1, 2, 2, 2)
    return math.isclose(_cap_of(cutagi.Sequential([linear, norm]), norm, 2)[0], 1, rel_tol=1e-3)
