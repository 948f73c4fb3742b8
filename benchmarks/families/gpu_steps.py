"""Training steps of one process on a GPU, queued one by one and as one CUDA graph; see `rows`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.families.compute import MLP, RESNET18, SGD_TARGET, SMALL, TOYS, Case
from benchmarks.harness import networks, sgd
from benchmarks.harness.gpus import Ways, find_gpu, measure_queued, why_no_gpu
from benchmarks.harness.measure import Figure, Missing, Row
from benchmarks.harness.networks import OUTPUTS
from benchmarks.harness.work import data
from tagi_ddp import Communicator, DDPSequential, accelerate

STEPS = [replace(RESNET18, batch=batch, calls=5, sgd_rounds=7) for batch in (128, 256)]
CAPTURED = [replace(MLP, batch=batch, calls=50, sgd_rounds=15) for batch in (16, 128, 1024)]
MLP_AIM = 0.1  # ms
# In float32 a step has 7 products for SGD's 3, so 2.33 times its time is what arithmetic allows.
SGD_TARGETS = {(RESNET18.name, 256): 1 / 2.4}
# Of a network whose kernels take no time: that of the launch alone, at most so many times.
BARE_TARGET = 1 / 5
OURS, GRAPH, SGD, BARE = "ours", "one CUDA graph", "torch's SGD", "a graph of one addition"


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(k) a step of one process against torch's own SGD, and the same step as one CUDA graph.

    A small network's graph is compared with one of an addition, too. Inputs, observations and all
    else are on the device; all compute in float32, without TF32.
    """
    steps, captured = STEPS, [*CAPTURED, replace(SMALL, calls=50)]
    if quick:
        steps = [replace(TOYS[RESNET18.name], calls=2)]
        captured = [replace(TOYS[case.name], calls=2) for case in (MLP, SMALL)]
    if reason := why_no_gpu():
        nothing = dict.fromkeys((OURS, GRAPH, SGD, BARE), Missing(reason))
        found = [_rows_of_steps(case, "a GPU", nothing) for case in steps]
        found += [_rows_of_graphs(case, "a GPU", nothing) for case in captured]
    else:
        device, name = find_gpu()
        torch.backends.cudnn.conv.fp32_precision = "ieee"
        found = [_compare_steps(communicator, case, device, name) for case in steps]
        found += [_compare_graphs(communicator, case, device, name) for case in captured]
    return [row for several in found for row in several]


Figures = Mapping[str, Figure | Missing]


def _rows_of_steps(case: Case, where: str, figures: Figures) -> Iterator[Row]:
    name = f"{case.name}, batch {case.batch}, {where}"
    target = SGD_TARGETS.get((case.name, case.batch), SGD_TARGET)
    yield Row(f"{name}, against torch's SGD", figures[OURS], figures[SGD], "ms", target)


def _rows_of_graphs(case: Case, where: str, figures: Figures) -> Iterator[Row]:
    name = f"{case.name}, batch {case.batch}, {where}, {GRAPH}"
    yield Row(f"{name}, against the step as it is", figures[GRAPH], figures[OURS], "ms", None)
    if case.name == SMALL.name:
        yield Row(f"{name}, against {BARE}", figures[GRAPH], figures[BARE], "ms", BARE_TARGET)
    elif case in CAPTURED:
        aim = Figure.single(MLP_AIM)
        yield Row(f"{name}, against an aim", figures[GRAPH], aim, "ms", 1.0)


def _compare_steps(
    communicator: Communicator, case: Case, device: torch.device, where: str
) -> Iterator[Row]:
    samples, labels = (torch.from_numpy(a).to(device) for a in data(case.inputs, case.batch))
    _, step = _step(case, samples)
    peer = case.peer(case.width).to(device)
    ways: Ways = {OURS: step, SGD: sgd.trainer(peer, samples, labels)}
    return _rows_of_steps(case, where, _measure(communicator, ways, device, case))


def _compare_graphs(
    communicator: Communicator, case: Case, device: torch.device, where: str
) -> Iterator[Row]:
    samples = torch.from_numpy(data(case.inputs, case.batch)[0]).to(device)
    ways: Ways = {OURS: _step(case, samples)[1]}
    missing: dict[str, Missing] = {}
    graph = _replayed(case, samples)
    if isinstance(graph, Missing):
        missing = {GRAPH: graph, BARE: graph}
    else:
        ways |= {GRAPH: graph, BARE: _addition(device)}
    return _rows_of_graphs(case, where, missing | _measure(communicator, ways, device, case))


def _measure(
    communicator: Communicator, ways: Ways, device: torch.device, case: Case
) -> dict[str, Figure]:
    """Return milliseconds a step."""
    figures = measure_queued(communicator, ways, device, case.calls, case.sgd_rounds)
    return {name: figure.in_unit(1e3) for name, figure in figures.items()}


def _step(
    case: Case, samples: Tensor, cuda_graph: bool = False
) -> tuple[DDPSequential, Callable[[], object]]:
    """Return a model and its training step, which has all it needs on its samples' device."""
    device = str(samples.device)
    net = case.network(case.width)
    model = accelerate(net, compute="torch", device=device, cuda_graph=cuda_graph)
    targets = torch.ones(case.batch, OUTPUTS, device=device)
    return model, lambda: model.learn(samples, targets, targets)


def _replayed(case: Case, samples: Tensor) -> Callable[[], object] | Missing:
    """Return a step that is replayed, seen to do the same work; or why there is none."""
    steps = 5  # of which the last ones are replayed
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "cuda_graph=True")
            model, step = _step(case, samples, cuda_graph=True)
            for _ in range(steps):
                step()
    except RuntimeWarning as warning:
        return Missing(str(warning))
    other, plain = _step(case, samples)
    for _ in range(steps):
        plain()
    networks.require_equal(model, other, case.network(case.width))
    return step


def _addition(device: torch.device) -> Callable[[], object]:
    """Return the replay of a graph of one addition."""
    number, graph = torch.zeros(1, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number.add_(1)
    return graph.replay
