"""All of the contract, for backends that keep all of it."""

from __future__ import annotations

from contract.arguments import AlignmentContract, ArgumentsContract
from contract.deaths import DeathsContract, StopContract
from contract.failures import ClosedContract, FailuresContract, InitContract
from contract.forks import ForksContract
from contract.interrupts import InterruptsContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.programs import ProgramsContract


class SoloDeviceContract(
    OperationsContract, ArgumentsContract, OrderContract, ProgramsContract, ClosedContract
):
    """The contract of a group of one whose buffers live on a device."""


class DeviceContract(
    SoloDeviceContract,
    GroupContract,
    FailuresContract,
    DeathsContract,
    StopContract,
    InitContract,
    InterruptsContract,
):
    """At every number of ranks from 2 on, whose buffers live on devices."""


class SoloContract(SoloDeviceContract, AlignmentContract):
    """The contract of a group of one."""


class WholeContract(DeviceContract, AlignmentContract, ForksContract):
    """At every number of ranks from 2 on."""
