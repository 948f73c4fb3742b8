"""The contract over torch.distributed's gloo."""

from contract.arguments import ArgumentsContract
from contract.deaths import DeathsContract
from contract.failures import ClosedContract, FailuresContract
from contract.operations import OperationsContract
from contract.order import GroupContract, OrderContract
from contract.programs import ProgramsContract


class TestGloo(
    OperationsContract,
    ArgumentsContract,
    OrderContract,
    GroupContract,
    ProgramsContract,
    ClosedContract,
    FailuresContract,
    DeathsContract,
):
    backend = "gloo"
    sizes = (2, 3, 4)
