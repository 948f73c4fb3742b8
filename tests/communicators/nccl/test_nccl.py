"""The contract over NCCL: on stand-ins for its library and CUDA's, and on GPUs if there are any."""

from __future__ import annotations

import pytest
from contract.arguments import AlignmentContract, ArgumentsContract
from contract.forks import ForksContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.whole import DeviceContract, SoloDeviceContract


@pytest.mark.ranks("nccl", 1)
@pytest.mark.ranks("nccl", 1, gpu=True, copied=True)
class TestNcclOfOne(SoloDeviceContract):
    """On one device."""


@pytest.mark.ranks("nccl", 2)
@pytest.mark.ranks("nccl", 2, gpu=True, copied=True)
class TestNccl(DeviceContract):
    """On a device for each rank, or on one that they share."""


@pytest.mark.slow
@pytest.mark.ranks("nccl", 4)
class TestNcclOfFour(DeviceContract):
    """On a device for each rank."""


@pytest.mark.ranks("nccl", 1)
class TestBuffersOfOne(AlignmentContract):
    """On the tests' own buffers, which stand in for those of a device."""


@pytest.mark.ranks("nccl", 2, 4)
class TestBuffers(AlignmentContract, ForksContract):
    """On the tests' own buffers, which stand in for those of a device."""


@pytest.mark.ranks("nccl", 2, copied=True)
class TestCopies(OperationsContract, ArgumentsContract, OrderContract, GroupContract):
    """On stand-ins: the copies that GPUs need change nothing that the tests see."""
