"""The exchange between ranks on GPUs in a step, over NCCL; see `rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.families.compute import RESNET18, TOYS, Case
from benchmarks.harness.gpus import OnGpus, Ways, measure_queued, ranks_on_gpus, why_no_ranks
from benchmarks.harness.measure import Figure, Missing, Row
from tagi_ddp import Communicator, DDPSequential

FULL = replace(RESNET18, batch=128, calls=3, sgd_rounds=9)
OURS, BLOCKING, SINGLE = "ours", "a blocking call for each", "one all_reduce of as many bytes"
GROUP, PACKED = "a group in place", "one packed bucket"
MERGE, ON_DEVICE = "a merge", "Bayes' rule in tensors on the device"
# Ours and the other, the row's unit and its target.
EXCHANGES = (
    (OURS, BLOCKING, "ms", 5.0),
    (OURS, SINGLE, "GB/s", 0.9),
    (GROUP, PACKED, "ms", None),
    (MERGE, ON_DEVICE, "ms", None),
)


def rows(communicator: Communicator, quick: bool, scratch: Path) -> list[Row]:
    """(j) ways to sum a step's deltas over the ranks, and to merge their posteriors.

    The sums begin with deltas where backward leaves them, and end with their sums there. Ours is
    all that `DDPSequential.step` does but applying them; the other ways have a buffer for means and
    variances of weights and biases of each layer. Our merge goes through the host.
    """
    case = replace(TOYS[RESNET18.name], calls=2) if quick else FULL
    if reason := why_no_ranks(communicator):
        return _rows_of(case, f"{communicator.size} ranks on GPUs", Missing(reason))
    with ranks_on_gpus(communicator) as gpus:
        return _compare(communicator, gpus, case)


def _rows_of(
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


def _compare(communicator: Communicator, gpus: OnGpus, case: Case) -> list[Row]:
    device = str(gpus.device)
    model = DDPSequential(
        case.network(case.width), communicator=gpus.nccl, compute="torch", device=device
    )
    with DDPSequential(
        case.network(case.width),
        communicator=gpus.nccl,
        compute="torch",
        device=device,
        reduction="precision",
        merge="bayes",
        sync_every=1000,
    ) as merging:
        ways = _exchanges(model, gpus.device) | _merges(merging)
        figures = measure_queued(communicator, ways, gpus.device, case.calls, case.sgd_rounds)
    size = model._local.replica.parameters.deltas.nbytes
    return _rows_of(case, gpus.where, figures, size / 1e9)


def _exchanges(model: DDPSequential, device: torch.device) -> Ways:
    """Return the ways to sum deltas over the ranks, each with its own.

    Each has been seen to sum. The deltas are zeros, which stay zeros however often.
    """
    nccl, parameters = model.communicator, model._local.replica.parameters
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

    add(OURS, [parameters.deltas], lambda: model._ranks.exchange(1))

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


def _merges(model: DDPSequential) -> Ways:
    """Return the ways to merge posteriors by Bayes' rule, which have been seen to do the same."""
    nccl, ours = model.communicator, model._local.replica.parameters.gaussians
    before, theirs = ours.clone(), ours.clone()
    for mean, variance in (ours, theirs):
        mean += 0.1 * (1 + nccl.rank) * variance.sqrt()
        variance *= 0.9 - 0.1 * nccl.rank

    def on_the_device() -> None:
        (mean, variance), (mean_before, variance_before) = theirs, before
        change = torch.stack([1 / variance - 1 / variance_before, (mean - mean_before) / variance])
        nccl.all_reduce(change.view(-1), async_op=True).order()
        torch.reciprocal(1 / variance_before + change[0], out=variance)
        torch.addcmul(mean_before, change[1], variance, out=mean)
        before.copy_(theirs)

    model.merge()
    on_the_device()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    return {MERGE: model.merge, ON_DEVICE: on_the_device}
