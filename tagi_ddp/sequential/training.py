"""The training steps of one rank with the others, by three calls or by one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp._backend import SharedStep
from tagi_ddp.checks import real
from tagi_ddp.communicators import CommunicatorError
from tagi_ddp.compute.interface import UpdateMethod
from tagi_ddp.compute.local_network import LocalNetwork
from tagi_ddp.compute.on_native import NativeCompute
from tagi_ddp.elastic.job import ElasticJob
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.shapes import learns_noise
from tagi_ddp.sequential.first_step import FirstStep
from tagi_ddp.sequential.output_updater import update_outputs
from tagi_ddp.sequential.prediction import predict
from tagi_ddp.sequential.slow_rank import SlowRank
from tagi_ddp.trace.timeline import timeline, traced
from tagi_ddp.update.exchange import Alone, InSharedMemory, Queued
from tagi_ddp.update.not_finite import NotFiniteError, refusal
from tagi_ddp.update.ranks import Ranks

if TYPE_CHECKING:
    from tagi_ddp.compute.step_graphs import StepGraphs


_PLAIN = (np.ndarray, type(None))  # A masked array has another type.
_NAMES = {"mu_obs": "mu_obs (y)", "var_obs": "var_obs (noise)"}  # the names in errors of `learn`


class Training:
    """The training steps of one rank with the others.

    Args:
        local: this rank's network.
        ranks: all ranks, whose exchange exists.
        merges: the ranks learn apart, and merge; else they have shares of the same batches.
        first: compares the ranks' data in the first step; None: nothing compares them.
        elastic: the job whose ranks may be lost and join, which then makes the exchanges; or None.
        cuda_graph: `learn` replays CUDA graphs.
    """

    def __init__(
        self,
        local: LocalNetwork,
        ranks: Ranks,
        merges: bool,
        first: FirstStep | None,
        elastic: ElasticJob | None,
        cuda_graph: bool,
    ) -> None:
        self._local, self._ranks = local, ranks
        self._merges = merges
        self._first = first
        self._elastic = elastic
        self._learns_noise = learns_noise(local.model)
        # Whole steps in one call: of the backend's kernels, and of all ranks if there are several.
        self._at_once: NativeCompute | None = None
        self._together: SharedStep | None = None
        self.graphs: StepGraphs | None = None
        rank, size = ranks.communicator.rank, ranks.communicator.size
        tells = elastic is not None or (rank == 0 and size > 1)
        self._slow_rank = SlowRank(ranks) if tells else None
        natively = local.computes.native
        if timeline is None:
            if isinstance(ranks.exchange, Alone):
                self._at_once = natively
            elif isinstance(ranks.exchange, InSharedMemory) and not local.swaps:
                self._at_once, self._together = natively, ranks.exchange.step
        if cuda_graph:
            from tagi_ddp.compute.step_graphs import make_step_graphs

            alone = ranks.communicator.size == 1 and isinstance(ranks.exchange, Queued)
            self.graphs = make_step_graphs(local.compute, local.rollback, alone)

    @traced("forward")
    def forward(
        self, mu_x: ArrayLike, var_x: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Compute the outputs of this rank's share."""
        if self._ranks.closed:
            self._ranks.require_open()
        try:
            shared = self._ranks.communicator.size > 1 and not self._merges
            look = self._first.look if self._first is not None else None
            return self._local.forward(mu_x, var_x, shared, look)
        except BaseException as error:
            self._ranks.give_up(error)
            raise

    @traced("backward")
    def backward(self) -> None:
        """Compute the deltas."""
        if self._ranks.closed:
            self._ranks.require_open()
        try:
            self._local.backward(self._ranks.exchange.early)
        except BaseException as error:
            self._ranks.give_up(error)
            raise

    @traced("step")
    def step(self) -> None:
        """Exchange the deltas of all ranks, and apply the same update to every replica."""
        if self._ranks.closed:
            self._ranks.require_open()
        local = self._local
        try:
            samples = local.accumulation.take()
            try:
                if self._first is not None:
                    self._compare(steps=True)
                if self._elastic is None:
                    self._ranks.exchange(samples)
                else:
                    self._elastic.step(samples)
            except BaseException:
                local.undo()
                raise
            local.end_step()
            if self._slow_rank is not None:
                self._slow_rank.after_step()
        except BaseException as error:
            self._ranks.give_up(error)
            raise

    def learn(
        self,
        mu_x: ArrayLike,
        mu_obs: ArrayLike,
        var_obs: ArrayLike | None,
        selected_idx: ArrayLike | None,
        var_x: ArrayLike | None,
    ) -> tuple[FloatArray, FloatArray]:
        """Make a whole step, and return the outputs before it."""
        try:
            var_obs = _for_all(mu_obs, var_obs)
            if var_obs is None and selected_idx is None and not self._learns_noise:
                raise ValueError(
                    "var_obs (noise) is None, but a network learns its noise only if it ends in "
                    "EvenExp, with two outputs for each of mu_obs (y): end it so, or give the "
                    "noise's variance, one number like 0.1**2"
                )
            if var_obs is None and selected_idx is not None:
                raise ValueError(
                    "selected_idx needs var_obs (noise), the variance of the observations' noise: "
                    "give one number, like 0.1**2, or one for each of mu_obs (y)"
                )
        except (TypeError, ValueError):
            with self._ranks.or_abort():
                raise
        local, natively = self._local, self._at_once
        accumulation = local.accumulation
        plain = type(mu_x) in _PLAIN and type(mu_obs) in _PLAIN and type(var_obs) in _PLAIN
        plain &= type(selected_idx) in _PLAIN and type(var_x) in _PLAIN
        if natively is not None and plain and not accumulation.adds and self._first is None:
            try:
                learned = natively.learn(mu_x, var_x, mu_obs, var_obs, selected_idx, self._together)
            except BaseException as error:
                refused = isinstance(error, TypeError | ValueError)
                if not refused or isinstance(error, CommunicatorError):
                    local.undo()
                    self._ranks.give_up(error)
                    raise
                learned = None  # The code below accepts more, or raises.
            if learned is not None:
                outputs, ranks, culprit = learned
                accumulation.forwarded = accumulation.samples = None
                if ranks:
                    raise NotFiniteError(refusal("step", ranks, culprit), ranks)
                if self._slow_rank is not None:
                    self._slow_rank.after_step()
                local.look_at_labels(mu_obs, selected_idx)
                return outputs
        observations: dict[str, ArrayLike] = {"mu_obs": mu_obs}
        method: UpdateMethod = "update_heteros"
        if var_obs is not None:
            observations["var_obs"], method = var_obs, "update"
        if selected_idx is not None:
            observations["selected_idx"], method = selected_idx, "update_using_indices"
        if self.graphs is not None and not accumulation.adds:
            with self._ranks.or_abort():
                replayed = self._replay(method, {"mu_x": mu_x, "var_x": var_x, **observations})
            if replayed is not None:
                return replayed
        outputs = self.forward(mu_x, var_x)
        try:
            with self._ranks.or_abort():
                update_outputs(local, method, observations, _NAMES)
        except BaseException:
            local.undo()
            raise
        self.backward()
        self.step()
        if local.compute is natively and type(mu_x) is np.ndarray and mu_x.size:
            natively.register_shape(mu_x.shape)
        return outputs

    def predict(
        self, x: ArrayLike, noise: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Predict in evaluation mode, and restore the mode."""
        model = self._local.model
        training = bool(model._cpp_backend.layers[0].training)
        with self._ranks.or_abort():
            model.eval()
            try:
                return predict(model, self.forward, x, noise)
            finally:
                if training:
                    model.train()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Follow the other ranks after the block, until all have left it."""
        with self._ranks.or_abort():
            if self._elastic is not None:
                raise RuntimeError("join() is not for an elastic job: loop over steps()")
        yield
        all_finished = False
        while not all_finished:
            with self._ranks.or_abort():
                self._local.replica.pull()
                if self._first is not None:
                    self._compare(steps=False)
                all_finished = self._ranks.exchange(0, finished=True)

    def close(self) -> None:
        """Make no more steps in one call."""
        self._at_once = self.graphs = None

    def _compare(self, steps: bool) -> None:
        """Compare the data of all ranks, before the first exchange; a collective call."""
        assert self._first is not None
        self._first.compare(steps)
        self._first = None

    def _replay(
        self, method: UpdateMethod, arguments: dict[str, Any]
    ) -> tuple[FloatArray, FloatArray] | None:
        """Make the step by a CUDA graph, and return the outputs; None if that is impossible."""
        graphs, accumulation = self.graphs, self._local.accumulation
        assert graphs is not None
        if graphs.alone:
            self._ranks.exchange.raise_refused(everything=False)
        outputs: tuple[Any, Any] | None = graphs.learn(method, arguments)
        if outputs is not None:
            if graphs.alone:
                accumulation.forwarded = accumulation.samples = None
            else:
                accumulation.forwarded = self._local.compute.samples
                accumulation.after_backward()
                self.step()
        return outputs


def one_of(name: str, value: Any, short: str, other: Any) -> Any:
    """Return the argument, passed by one of its two names; only the noise may be missing."""
    if value is not None and other is not None:
        raise TypeError(f"learn() got both {name} and {short}, which are the same: give one")
    if value is None and other is None and short != "noise":
        raise TypeError(f"learn() needs {name}, or {short} by name")
    return other if value is None else value


def _for_all(mu_obs: Any, var_obs: Any) -> Any:
    """Return a variance for each observation if ``var_obs`` is one number, also numpy's."""
    if getattr(var_obs, "ndim", not isinstance(var_obs, Real)):
        return var_obs
    name = _NAMES["var_obs"]
    number = real(name, var_obs.item() if hasattr(var_obs, "item") else var_obs)
    if not 0 <= number < math.inf:
        raise ValueError(
            f"{name} is {number:g}: the variance of the noise is finite and not negative, the "
            "square of its standard deviation"
        )
    if hasattr(mu_obs, "new_full"):  # This is a tensor, perhaps of integers.
        return mu_obs.float().new_full(mu_obs.shape, number)
    return np.full(np.shape(mu_obs), number, np.float32)
