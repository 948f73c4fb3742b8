"""What follows from the ranks' words on a device is what the host derives."""

from __future__ import annotations

import pytest
import torch

from tagi_ddp import _backend
from tagi_ddp.replica.device_agreement import DeviceAgreement


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("batches", [(1, 0), (1, 1), (2, 2), (100, 155), (156, 100), (255, 256)])
def test_as_on_the_host(batches: tuple[int, int], average: bool) -> None:
    table = torch.tensor([[batch, 0, 1, 1] for batch in batches])
    device = DeviceAgreement.of_all(table, average)
    host = _backend.Agreement([_backend.Contribution(batch) for batch in batches])
    assert (1 if device.divisor is None else device.divisor) == host.divisor(average)
    assert device.cap == host.cap(average)
    assert not device.refused
