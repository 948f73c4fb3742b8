"""The contract over NCCL, on stand-ins for its library and CUDA's: no GPU is needed or used."""

from __future__ import annotations

from contract.arguments import ArgumentsContract
from contract.deaths import DeathsContract, StopContract
from contract.failures import ClosedContract, FailuresContract, InitContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.programs import ProgramsContract


class TestNcclOfOne(
    OperationsContract, ArgumentsContract, OrderContract, ProgramsContract, ClosedContract
):
    backend = "nccl"
    sizes = (1,)


class TestNccl(
    OperationsContract,
    ArgumentsContract,
    OrderContract,
    GroupContract,
    ProgramsContract,
    ClosedContract,
    FailuresContract,
    DeathsContract,
    StopContract,
    InitContract,
):
    backend = "nccl"
    sizes = (2, 4)
