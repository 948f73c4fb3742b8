"""The contract in a world of one."""

from contract.arguments import ArgumentsContract
from contract.failures import ClosedContract
from contract.operations import OperationsContract
from contract.order import OrderContract
from contract.programs import ProgramsContract


class TestSingle(
    OperationsContract, ArgumentsContract, OrderContract, ProgramsContract, ClosedContract
):
    backend = "single"
    sizes = (1,)
