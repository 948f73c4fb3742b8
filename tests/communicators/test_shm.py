"""The contract over shared memory."""

from contract.whole import WholeContract


class TestShm(WholeContract):
    backend = "shm"
    sizes = (2, 3, 4)
