"""Training steps as CUDA graphs: a step's kernels are queued at once, not one by one by Python.

A replay repeats the addresses and numbers of the step that was captured, so what changes from step
to step must be in tensors that stay. https://docs.pytorch.org/docs/stable/notes/cuda.html tells
what else a capture demands.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from tagi_ddp.compute.interface import UpdateMethod
from tagi_ddp.compute.on_torch import Results, TorchCompute
from tagi_ddp.compute.rollback import Rollback
from tagi_ddp.replica.device import DeviceReplica
from tagi_ddp.replica.device_agreement import DeviceAgreement
from tagi_ddp.trace.timeline import timeline

_CAPTURES = "cuda"  # the kind of devices that capture what they are told
_WARM_UP = 3  # steps of a size before its capture: they load kernels and choose among them
_MOST = 8  # sizes that are captured; each keeps the memory of a step
T = TypeVar("T")


class StepGraphs:
    """Forward, update of the outputs and backward as one CUDA graph for each size of batch.

    ``alone``: with the update of the parameters, in which no other rank has a part.
    """

    def __init__(
        self, compute: TorchCompute, replica: DeviceReplica, rollback: Rollback, alone: bool
    ) -> None:
        """Nothing is captured yet."""
        self.alone = alone
        self._rollback = rollback
        self._compute = compute
        self._replica = replica
        self._device = replica.parameters.mu.device
        self._steps: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self._failed = False
        self._told: set[str] = set()

    @torch.inference_mode()
    def learn(self, method: UpdateMethod, given: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Replay a step with ``given``, mu_x, var_x and observations, in the order of ``method``.

        Returns the outputs before it, means and variances; None if this step is to be taken as
        without graphs: an empty share's, the first of a size, those that begin running statistics,
        and, with one warning for each reason, those that cannot be captured.
        """
        compute = self._compute
        if self._failed or not compute.training or self._replica.statistics.await_first_batch:
            return None
        tensors: dict[str, Tensor] = {}
        for name, value in given.items():
            if isinstance(value, Tensor) and value.device == self._device:
                tensors[name] = value
            elif value is not None:
                self._tell(f"{name} is no tensor on {self._device}")
                return None
        if not tensors["mu_x"].numel():
            return None
        parts = tuple((name, value.shape, value.dtype) for name, value in tensors.items())
        size = method, parts, compute.to_input
        graph = self._graphs.get(size)
        if graph is None:
            self._steps[size] += 1
            if self._steps[size] <= _WARM_UP:
                return None
            if len(self._graphs) == _MOST:
                self._tell(f"{_MOST} sizes of batches have one, and no more are captured")
                return None
            try:
                graph = self._capture(method, tensors)
            except RuntimeError as error:
                self._failed = True
                self._tell(f"the capture failed: {str(error).partition(chr(10))[0]}")
                return None
            self._graphs[size] = graph
        for name, value in tensors.items():
            graph.given[name].copy_(value)
        if not self.alone:
            self._keep()
        graph.replay()
        compute.results = graph.results
        if graph.agreement is not None:
            self._replica.applied(graph.agreement)
        mean, variance = torch.stack(graph.outputs)
        return mean, variance

    def _capture(self, method: UpdateMethod, tensors: Mapping[str, Tensor]) -> _Graph:
        compute = self._compute
        given = {name: value.clone() for name, value in tensors.items()}
        flat = {name: value.reshape(-1) for name, value in given.items()}
        mean, variance = flat.pop("mu_x").view(-1, compute.input_size), flat.pop("var_x", None)

        def step() -> tuple[tuple[Tensor, Tensor], DeviceAgreement | None]:
            if self.alone:
                self._keep()
            # No input is copied: a graph with copies takes twice as long to launch.
            spread = None if variance is None else variance.view_as(mean).float()
            states = compute.compute_states(mean.float(), spread)
            outputs = states.mean.flatten(), states.variance_tensor().flatten()
            compute.update_outputs(method, flat)
            compute.backward()
            if not self.alone:
                return outputs, None
            agreement = self._replica.apply_alone(compute.samples)
            self._rollback.restore_if(agreement.refused)
            return outputs, agreement

        replay, (outputs, agreement) = _capture(step, self._device)
        return _Graph(given, replay, outputs, agreement, compute.results)

    def _keep(self) -> None:
        if self._rollback.needed:
            self._rollback.keep()

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(_text(reason), RuntimeWarning, stacklevel=7)


@dataclass(frozen=True)
class _Graph:
    """A captured step: where it reads what is given, and where it writes what comes of that."""

    given: dict[str, Tensor]
    replay: Callable[[], None]
    outputs: tuple[Tensor, Tensor]
    agreement: DeviceAgreement | None
    results: Results


def make_step_graphs(compute: Any, rollback: Rollback, alone: bool) -> StepGraphs | None:
    """Return graphs of the steps that ``compute`` takes; None, with a warning, if none can be."""
    reason = _why_not(compute)
    if reason is not None:
        warnings.warn(_text(reason), RuntimeWarning, stacklevel=4)
        return None
    return StepGraphs(compute, compute.replica, rollback, alone)


def _why_not(compute: Any) -> str | None:
    if not isinstance(compute, TorchCompute):
        return f'compute is "{compute.name}", and CUDA graphs are torch\'s'
    if compute.device.type != _CAPTURES:
        return f"the network is on {compute.device}, not on a GPU"
    if compute.network.carries_states:
        return "LSTM layers carry states from step to step"
    if timeline is not None:
        return "a timeline shows the parts of a step, of which a graph makes one"
    return None


def _text(reason: str) -> str:
    return f"cuda_graph=True: learn() takes steps without a CUDA graph, as {reason}."


def _capture(run: Callable[[], T], device: torch.device) -> tuple[Callable[[], None], T]:
    """Return what repeats ``run`` on ``device``, where nothing runs yet, and what it returned."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, as loaders of data, may go on using the GPU.
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
    ):
        result = run()
    return graph.replay, result
