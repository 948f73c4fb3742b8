"""The contract in a world of one."""

from contract.whole import SoloContract


class TestSingle(SoloContract):
    backend = "single"
    sizes = (1,)
