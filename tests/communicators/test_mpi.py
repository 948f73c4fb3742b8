"""The contract over MPI, in worlds that mpirun starts."""

from contract.arguments import ArgumentsContract
from contract.failures import ClosedContract, FailuresContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.programs import ProgramsContract


class TestMpi(
    OperationsContract,
    ArgumentsContract,
    OrderContract,
    GroupContract,
    ProgramsContract,
    ClosedContract,
    FailuresContract,
):
    backend = "mpi"
    sizes = (2, 3, 4)
