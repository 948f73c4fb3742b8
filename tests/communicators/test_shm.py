"""The contract over shared memory."""

from contract.arguments import ArgumentsContract
from contract.deaths import DeathsContract
from contract.failures import ClosedContract, FailuresContract
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
):
    backend = "shm"
    sizes = (2, 3, 4)
