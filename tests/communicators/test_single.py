"""The contract in a world of one."""

from contract.arguments import ArgumentsContract
from contract.operations import OperationsContract
from contract.order import OrderContract
from contract.programs import ProgramsContract


class TestSingle(OperationsContract, ArgumentsContract, OrderContract, ProgramsContract):
    backend = "single"
    sizes = (1,)
