"""Training steps as CUDA graphs, which queue all kernels of a step in one call.

A replay repeats the addresses and numbers of the captured step, so values that change from step to
step must be in tensors that stay. Other requirements of a capture are described in
https://docs.pytorch.org/docs/stable/notes/cuda.html.
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

_CAPTURES = "cuda"  # the type of devices that can capture
_WARM_UP = 3  # steps of a size before its capture, which load kernels and choose among them
_MOST = 8  # the largest number of sizes with a graph; each keeps the memory of a step
T = TypeVar("T")


class StepGraphs:
    """Forward, update of the outputs and backward as one CUDA graph for each size of batch.

    If ``alone``, no other rank takes part, and the graph includes the update of the parameters.
    """

    def __init__(
        self, compute: TorchCompute, replica: DeviceReplica, rollback: Rollback, alone: bool
    ) -> None:
        """Begin without any graph."""
        self.alone = alone
        self._rollback = rollback
        self._compute = compute
        self._replica = replica
        self._device = replica.parameters.mu.device
        self._steps: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, _Graph] = {}
        self._failed = False
        self._warned: set[str] = set()

    @torch.inference_mode()
    def learn(self, method: UpdateMethod, args: Mapping[str, Any]) -> tuple[Tensor, Tensor] | None:
        """Replay a step with ``args``: mu_x, var_x, and observations in the order of ``method``.

        Returns means and variances of the outputs before the step, or None if the caller must take
        the step without a graph. That is so for an empty share, the first steps of a size, the step
        that begins running statistics, and, with one warning a reason, if a capture is impossible.
        """
        compute = self._compute
        if self._failed or not compute.training or self._replica.statistics.await_first_batch:
            return None
        tensors: dict[str, Tensor] = {}
        for name, value in args.items():
            if isinstance(value, Tensor) and value.device == self._device:
                tensors[name] = value
            elif value is not None:
                self._warn_once(f"{name} is no tensor on {self._device}")
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
                self._warn_once(f"{_MOST} sizes of batches have one, and no more are captured")
                return None
            try:
                graph = self._capture(method, tensors)
            except RuntimeError as error:
                self._failed = True
                self._warn_once(f"the capture failed: {str(error).partition(chr(10))[0]}")
                return None
            self._graphs[size] = graph
        torch._foreach_copy_([graph.inputs[name] for name in tensors], [*tensors.values()])
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
        inputs = {name: value.clone() for name, value in tensors.items()}
        flat = {name: value.reshape(-1) for name, value in inputs.items()}
        mean, variance = flat.pop("mu_x").view(-1, compute.input_size), flat.pop("var_x", None)

        def step() -> tuple[tuple[Tensor, Tensor], DeviceAgreement | None]:
            if self.alone:
                self._keep()
            # The inputs are not copied: a graph with copies takes twice as long to launch.
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
        return _Graph(inputs, replay, outputs, agreement, compute.results)

    def _keep(self) -> None:
        if self._rollback.needed:
            self._rollback.keep()

    def _warn_once(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(_text(reason), RuntimeWarning, stacklevel=8)


@dataclass(frozen=True)
class _Graph:
    """A captured step: the tensors that it reads, and those that it writes."""

    inputs: dict[str, Tensor]
    replay: Callable[[], None]
    outputs: tuple[Tensor, Tensor]
    agreement: DeviceAgreement | None
    results: Results


def make_step_graphs(compute: Any, rollback: Rollback, alone: bool) -> StepGraphs | None:
    """Return graphs of the steps of ``compute``; None, with a warning, if graphs are impossible."""
    reason = _why_not(compute)
    if reason is not None:
        warnings.warn(_text(reason), RuntimeWarning, stacklevel=5)
        return None
    return StepGraphs(compute, compute.replica, rollback, alone)


def _why_not(compute: Any) -> str | None:
    if not isinstance(compute, TorchCompute):
        return f'compute is "{compute.name}", and CUDA graphs are torch\'s'
    if compute.device.type != _CAPTURES:
        return f"the network is on {compute.device}, not on a GPU"
    if compute.network.is_recurrent:
        return "LSTM layers keep states between steps"
    if timeline is not None:
        return "a timeline shows the parts of a step, which a graph would join"
    return None


def _text(reason: str) -> str:
    return f"cuda_graph=True: learn() takes steps without a CUDA graph, as {reason}."


def _capture(run: Callable[[], T], device: torch.device) -> tuple[Callable[[], None], T]:
    """Return a function that repeats ``run`` on an idle ``device``, and the result of ``run``."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as data loaders, may use the GPU meanwhile.
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"),
    ):
        result = run()
    return graph.replay, result
