"""What ranks on GPUs exchange in a step, over NCCL, and a step itself; see `rows`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.families.compute import RESNET18, SGD_TARGET, TOYS, Case
from benchmarks.harness import sgd
from benchmarks.harness.measure import Contender, Figure, Missing, Row, measure
from benchmarks.harness.networks import OUTPUTS
from benchmarks.harness.work import data
from tagi_ddp import (
    BackendUnavailable,
    Communicator,
    DDPSequential,
    OutputUpdater,
    accelerate,
    init,
)
from tagi_ddp.communicators import all_gather_object
from tagi_ddp.communicators.nccl.libraries import find_device, open_cuda, open_nccl

Ways = dict[str, Callable[[], object]]

FULL = replace(RESNET18, batch=128, calls=10, sgd_rounds=15)
OURS, BLOCKING, SINGLE = "ours", "a blocking call for each", "one all_reduce of as many bytes"
GROUP, PACKED = "a group in place", "one packed bucket"
# Ours and the other, the row's unit and its target.
EXCHANGES = (
    (OURS, BLOCKING, "ms", 5.0),
    (OURS, SINGLE, "GB/s", 0.9),
    (GROUP, PACKED, "ms", None),
)
STAND_IN = "stand-in"  # the name of a device of the tests' libraries, whose memory is the host's
FIRST_NCCL_THAT_SHARES = 23000  # as NCCL numbers its versions


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(j) ways to sum a step's deltas over the ranks, (k) a step of one against torch's own SGD.

    (j) begins with deltas where backward leaves them, and ends with their sums there. Ours is all
    that `DDPSequential.step` does but applying them; the other ways have a buffer for means and
    variances of weights and biases of each layer.
    """
    case = replace(TOYS[RESNET18.name], calls=2) if quick else FULL
    reasons = all_gather_object(communicator, _why_not(communicator.size))
    if any(reasons):
        missing = Missing(next(filter(None, reasons)))
        exchanges = _rows_of_exchanges(case, f"{communicator.size} ranks on GPUs", missing)
        return [*exchanges, _row_of_steps(case, "a GPU", missing)]
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    devices = min(communicator.size, open_cuda().device_count)
    shared = "cuda:0" if devices == 1 else None
    with init("nccl", communicator.rank, communicator.size, device=shared) as nccl:
        name = find_device(int(nccl.device.removeprefix("cuda:"))).name
        device = torch.device("cpu:0" if name == STAND_IN else nccl.device)
        found = _compare_exchanges(
            communicator, nccl, device, case, f"{nccl.size} ranks on {devices} x {name}"
        )
    return [*found, _compare_steps(communicator, device, case, name)]


def _why_not(ranks: int) -> str:
    """Return why so many ranks cannot be measured here, or ""."""
    try:
        devices, version, name = open_cuda().device_count, open_nccl().version, find_device(0).name
    except BackendUnavailable as error:
        return str(error) if torch.cuda.is_available() else "torch finds no GPU"
    if name != STAND_IN and not torch.cuda.is_available():
        return "torch finds no GPU"
    if devices < ranks and version < FIRST_NCCL_THAT_SHARES:
        return "ranks can share a GPU with NCCL 2.30 or newer only"
    return ""


def _rows_of_exchanges(
    case: Case, where: str, figures: dict[str, Figure] | Missing, gigabytes: float = 0
) -> list[Row]:
    def figure(way: str, unit: str) -> Figure | Missing:
        if isinstance(figures, Missing):
            return figures
        return figures[way].rate(gigabytes) if unit == "GB/s" else figures[way].in_unit(1e3)

    return [
        Row(
            f"exchange, {case.name}, {where}, {ours}, against {other}",
            figure(ours, unit),
            figure(other, unit),
            unit,
            target,
        )
        for ours, other, unit, target in EXCHANGES
    ]


def _row_of_steps(case: Case, where: str, figures: dict[str, Figure] | Missing) -> Row:
    name = f"{case.name}, batch {case.batch}, {where}, against torch's SGD"
    if isinstance(figures, Missing):
        return Row(name, figures, figures, "ms", SGD_TARGET)
    return Row(name, figures[OURS].in_unit(1e3), figures["sgd"].in_unit(1e3), "ms", SGD_TARGET)


def _compare_exchanges(
    communicator: Communicator, nccl: Communicator, device: torch.device, case: Case, where: str
) -> list[Row]:
    model = DDPSequential(
        case.network(case.width), communicator=nccl, compute="torch", device=str(device)
    )
    ways = _exchanges(model, device)
    figures = _measure(communicator, ways, device, case)
    size = model._replica.parameters.deltas.nbytes
    return _rows_of_exchanges(case, where, figures, size / 1e9)


def _exchanges(model: DDPSequential, device: torch.device) -> Ways:
    """Return the ways to sum deltas over the ranks, each with its own.

    Each has been seen to sum. The deltas are zeros, which stay zeros however often.
    """
    nccl, parameters = model.communicator, model._replica.parameters
    parameters.apply_agreed = lambda agreement: None
    counts = [count for _, count in parameters.blocks for _ in ("mean", "variance") if count]
    ways: Ways = {}

    def add(name: str, deltas: list[Tensor], run: Callable[[], object]) -> None:
        for part in deltas:
            part.fill_(1 + nccl.rank)
        run()
        if not all(bool((part == nccl.size * (nccl.size + 1) / 2).all()) for part in deltas):
            raise RuntimeError(f"{name} did not sum over the ranks")
        for part in deltas:
            part.zero_()
        ways[name] = run

    def buffers() -> list[Tensor]:
        return [torch.empty(count, device=device) for count in counts]

    add(OURS, [parameters.deltas], lambda: model._exchange(1))

    each = buffers()
    add(BLOCKING, each, lambda: [nccl.all_reduce(part) for part in each])

    flat = torch.empty_like(parameters.deltas)
    add(SINGLE, [flat], lambda: nccl.all_reduce(flat, async_op=True).order())

    together = buffers()

    def reduce_in_group() -> None:
        with nccl.group() as work:
            for part in together:
                nccl.all_reduce(part)
        work.order()

    add(GROUP, together, reduce_in_group)

    packed, bucket = buffers(), torch.empty_like(parameters.deltas)

    def pack_and_reduce() -> None:
        torch.cat(packed, out=bucket)
        nccl.all_reduce(bucket, async_op=True).order()
        torch._foreach_copy_(packed, bucket.split(counts))

    add(PACKED, packed, pack_and_reduce)
    return ways


def _compare_steps(communicator: Communicator, device: torch.device, case: Case, where: str) -> Row:
    """Compare steps of rank 0 alone; both compute in float32, without TF32."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    ways: Ways = dict.fromkeys((OURS, "sgd"), lambda: None)
    if communicator.rank == 0:
        samples, labels = (torch.from_numpy(a).to(device) for a in data(case.inputs, case.batch))
        peer = case.peer(case.width).to(device)
        ways = {OURS: _step(case, samples), "sgd": sgd.trainer(peer, samples, labels)}
    figures = _measure(communicator, ways, device, case, alone=True)
    return _row_of_steps(case, where, figures)


def _step(case: Case, samples: Tensor) -> Callable[[], None]:
    """Return a training step that has all it needs on the device of its samples."""
    device = str(samples.device)
    model = accelerate(case.network(case.width), compute="torch", device=device)
    updater = OutputUpdater(model)
    targets = torch.ones(case.batch, OUTPUTS, device=device)

    def step() -> None:
        model(samples)
        updater.update(targets, targets)
        model.backward()
        model.step()

    return step


def _measure(
    communicator: Communicator, ways: Ways, device: torch.device, case: Case, alone: bool = False
) -> dict[str, Figure]:
    """Return the seconds that each way takes once, of several in a row, to the device's end."""

    def several(run: Callable[[], object]) -> Callable[[], None]:
        def runs() -> None:
            for _ in range(case.calls):
                run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        return runs

    contenders = [Contender(name, several(run), alone=alone) for name, run in ways.items()]
    figures = measure(communicator, contenders, case.sgd_rounds)
    return {name: figure.in_unit(1 / case.calls) for name, figure in figures.items()}
