"""`learn`, a whole training step in one call, `predict` and `join`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from tagi_ddp._backend import SharedStep
from tagi_ddp.checks import real
from tagi_ddp.communicators import Communicator, CommunicatorError
from tagi_ddp.compute import NativeCompute
from tagi_ddp.compute.interface import UpdateMethod
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.engine.buffers import FloatArray
from tagi_ddp.engine.threads import one_at_a_time
from tagi_ddp.sequential.interface import SequentialInterface
from tagi_ddp.sequential.membership import Membership
from tagi_ddp.sequential.output_updater import update_outputs
from tagi_ddp.sequential.prediction import predict
from tagi_ddp.sequential.same_rows import SameRows
from tagi_ddp.trace.timeline import timeline
from tagi_ddp.update.exchange import Alone, Exchange, InSharedMemory, Queued
from tagi_ddp.update.not_finite import NotFiniteError, refusal

if TYPE_CHECKING:
    from tagi_ddp.compute.step_graphs import StepGraphs


_PLAIN = (np.ndarray, type(None))  # A masked array has another type.
_NAMES = {"mu_obs": "mu_obs (y)", "var_obs": "var_obs (noise)"}  # the names in errors of `learn`


class LearnInterface(SequentialInterface):
    """`learn`, `predict` and `join`, for a class that has forward, backward and step."""

    forward: Callable[..., tuple[FloatArray, FloatArray]]
    backward: Callable[[], None]
    step: Callable[[], None]
    communicator: Communicator
    """The communicator of all ranks; in an elastic job, that of the present group."""
    _membership: Membership | None
    _exchange: Exchange
    _or_abort: Callable[[], AbstractContextManager[None]]
    _rollback: Rollback
    _undo: Callable[[], None]
    _give_up: Callable[[BaseException], None]
    _at_once: NativeCompute | None = None  # makes whole steps in one call
    _step_together_at_once: SharedStep | None = None  # makes those of all ranks
    _swaps: bool
    _graphs: StepGraphs | None = None
    _same_rows: SameRows | None = None  # until the first exchange

    def _find_fast_paths(self, cuda_graph: bool) -> None:
        """Find the whole steps that can be one call of the backend, or one CUDA graph."""
        alone = self.communicator.size == 1 and self._membership is None
        natively = getattr(self._by_batch, "natively", self.compute)
        if timeline is None and isinstance(natively, NativeCompute):
            if isinstance(self._exchange, Alone):
                self._at_once = natively
            elif isinstance(self._exchange, InSharedMemory) and not self._swaps:
                self._at_once, self._step_together_at_once = natively, self._exchange.step
        if cuda_graph:
            from tagi_ddp.compute.step_graphs import make_step_graphs

            alone = alone and isinstance(self._exchange, Queued)
            self._graphs = make_step_graphs(self.compute, self._rollback, alone)

    @one_at_a_time
    def learn(
        self,
        mu_x: ArrayLike | None = None,
        mu_obs: ArrayLike | None = None,
        var_obs: ArrayLike | None = None,
        selected_idx: ArrayLike | None = None,
        var_x: ArrayLike | None = None,
        *,
        x: ArrayLike | None = None,
        y: ArrayLike | None = None,
        noise: ArrayLike | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Train on this rank's share of a batch: forward, output update, backward and step.

        ``x``, ``y`` and ``noise`` are other names of ``mu_x``, ``mu_obs`` and ``var_obs``.

        Args:
            mu_x: the inputs, [batch, inputs] or flat, as for `forward`. Required, by either name.
            mu_obs: the observations, [batch, outputs] or flat: a float for each output, for each of
                ``selected_idx``, or, without ``var_obs``, for each two outputs. NaN: no
                observation. Required, by either name.
            var_obs: the variances of the observations' noise, of the same size, or one number for
                all; finite and not negative for each observation (not checked in tensors on a GPU).
                None: the noise is unknown, and every second output is its expected variance.
            selected_idx: the numbers of the observed outputs, counted from 1, equally many for each
                sample, as for hierarchical softmax; None: all.
            var_x: the variances of the inputs, of the same size; None: the inputs are exact.

        Returns:
            the outputs of `forward`: the predictions before the step. `get_input_states` may have
            no values after it.

        Raises:
            ValueError: rows, sizes or variances do not fit; the text names the argument.
            TypeError: an argument is missing, has another type, or was passed by both names.
            NotFiniteError: on all ranks, with nothing learned: a delta is NaN or infinite.
            Timeout, PeerLost, Mismatch: ranks were late, are lost, or called something else.
        """
        try:
            if mu_x is None or mu_obs is None or not (x is y is noise is None):
                mu_x = _one_of("mu_x", mu_x, "x", x)
                mu_obs = _one_of("mu_obs", mu_obs, "y", y)
                var_obs = _one_of("var_obs", var_obs, "noise", noise)
            var_obs = _for_all(mu_obs, var_obs)
            if var_obs is None and selected_idx is not None:
                raise ValueError(
                    "selected_idx needs var_obs (noise), the variance of the observations' noise: "
                    "give one number, like 0.1**2, or one for each of mu_obs (y)"
                )
        except (TypeError, ValueError):
            with self._or_abort():
                raise
        natively, accumulation = self._at_once, self._accumulation
        plain = type(mu_x) in _PLAIN and type(mu_obs) in _PLAIN and type(var_obs) in _PLAIN
        plain &= type(selected_idx) in _PLAIN and type(var_x) in _PLAIN
        if natively is not None and plain and not accumulation.adds and self._same_rows is None:
            together = self._step_together_at_once
            try:
                learned = natively.learn(mu_x, var_x, mu_obs, var_obs, selected_idx, together)
            except CommunicatorError as error:
                self._undo()
                self._give_up(error)
                raise
            except (TypeError, ValueError):  # The code below accepts more, or raises.
                learned = None
            if learned is not None:
                outputs, ranks, culprit = learned
                accumulation.forwarded = accumulation.samples = None
                if ranks:
                    raise NotFiniteError(refusal("step", ranks, culprit), ranks)
                return outputs
        observations: dict[str, ArrayLike] = {"mu_obs": mu_obs}
        method: UpdateMethod = "update_heteros"
        if var_obs is not None:
            observations["var_obs"], method = var_obs, "update"
        if selected_idx is not None:
            observations["selected_idx"], method = selected_idx, "update_using_indices"
        if self._graphs is not None and not accumulation.adds:
            with self._or_abort():
                replayed = self._replay(method, {"mu_x": mu_x, "var_x": var_x, **observations})
            if replayed is not None:
                return replayed
        outputs = self.forward(mu_x, var_x)
        try:
            with self._or_abort():
                update_outputs(self, method, observations, _NAMES)
        except BaseException:
            self._undo()
            raise
        self.backward()
        self.step()
        if self.compute is natively and type(mu_x) is np.ndarray and mu_x.size:
            natively.register_shape(mu_x.shape)
        return outputs

    @one_at_a_time
    def predict(
        self, x: ArrayLike, noise: ArrayLike | None = None
    ) -> tuple[FloatArray, FloatArray]:
        """Predict any number of samples in evaluation mode, and restore the mode.

        Not a collective call: each rank predicts its own samples. Layers that remember a series
        continue it, as in `forward`, if ``x`` is a single sample.

        Args:
            x: the inputs, flat or not, samples * input size numbers.
            noise: the variance of the observations' noise, which is added to the predictions': a
                number, one for each output, or an array of [samples, outputs]. None: the learned
                noise if the network ends in EvenExp, else none. 0: no noise, only the uncertainty
                of the network itself.

        Returns:
            means and variances, float32 arrays of [samples, outputs], also for a single output. If
            the network ends in EvenExp, every second output is the noise of the one before and is
            left out, so there are half as many.

        Raises:
            ValueError: ``x`` has no whole samples, or ``noise`` is negative or of another shape.
        """
        training = bool(self.model._cpp_backend.layers[0].training)
        with self._or_abort():
            self.eval()
            try:
                return predict(self.model, self.forward, x, noise)
            finally:
                if training:
                    self.train()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Allow ranks to run out of batches at different times.

        All ranks run their steps inside ``with model.join():``. A rank that leaves the block early
        follows the others' updates, without deltas of its own, until all have left. No other
        collective operation is allowed in the block.

        Raises NotFiniteError, as `step` does on all ranks; to continue like the others, a rank then
        enters another, empty block. Raises RuntimeError in an elastic job, whose ranks run out of
        batches together: `steps`.
        """
        with self._or_abort():
            if self._membership is not None:
                raise RuntimeError("join() is not for an elastic job: loop over steps()")
        yield
        all_finished = False
        while not all_finished:
            with self._or_abort():
                self._replica.pull()
                all_finished = self._exchange(0, finished=True)
                if self._same_rows is not None:
                    self._compare_rows(stepped=False)

    def _compare_rows(self, stepped: bool) -> None:
        """Compare the rows of all ranks, after the first exchange; a collective call."""
        assert self._same_rows is not None
        self._same_rows.compare(stepped)
        self._same_rows = None

    def _replay(
        self, method: UpdateMethod, arguments: dict[str, Any]
    ) -> tuple[FloatArray, FloatArray] | None:
        """Make the step by a CUDA graph, and return the outputs; None if that is impossible."""
        graphs, accumulation = self._graphs, self._accumulation
        assert graphs is not None
        if graphs.alone:
            self._exchange.raise_refused(everything=False)
        outputs: tuple[Any, Any] | None = graphs.learn(method, arguments)
        if outputs is not None:
            if graphs.alone:
                accumulation.forwarded = accumulation.samples = None
            else:
                accumulation.forwarded = self.compute.samples
                accumulation.after_backward()
                self.step()
        return outputs


def _one_of(name: str, value: Any, short: str, other: Any) -> Any:
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
