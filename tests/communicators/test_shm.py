"""The contract over shared memory."""

from contract.arguments import ArgumentsContract
from contract.deaths import DeathsContract, StopContract
from contract.failures import ClosedContract, FailuresContract, InitContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.programs import ProgramsContract


class TestShm(
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
    backend = "shm"
    sizes = (2, 3, 4)
