"""The agreement that a device derives from the ranks' contributions equals the host's."""

from __future__ import annotations

import math

import pytest
import torch

from tagi_ddp import _backend
from tagi_ddp.replica.device_agreement import Constants, DeviceAgreement

CONSTANTS = Constants(torch.device("cpu"), _backend.cap_factor)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("batches", [(1, 0), (1, 1), (2, 2), (100, 155), (156, 100), (255, 256)])
def test_as_on_the_host(batches: tuple[int, int], average: bool) -> None:
    table = torch.tensor([[batch, 0, 1, 1] for batch in batches])
    device = DeviceAgreement.of_all(table, average, CONSTANTS)
    host = _backend.Agreement([_backend.Contribution(batch) for batch in batches])
    assert (1 if device.divisor is None else device.divisor) == host.divisor(average)
    assert device.cap == _backend.cap_factor(host.capped_as(average))
    assert not device.refused


@pytest.mark.parametrize(
    ("value", "refused"),
    [(math.nan, True), (math.inf, True), (-math.inf, True), (3e38, False), (-3e38, False)],
)
@pytest.mark.parametrize("place", [0, 1, 999])
def test_one_rank_refuses_what_is_not_finite(value: float, refused: bool, place: int) -> None:
    deltas = torch.ones(1000)
    deltas[place] = value
    agreement = DeviceAgreement.of_one(deltas, 300, 4, CONSTANTS)
    assert bool(agreement.refused) == refused
    assert agreement.table[0].tolist() == [300, 0, not refused, 1]
    assert agreement.cap == _backend.cap_factor(1200) * 2
