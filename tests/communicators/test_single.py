"""The contract in a world of one."""

import sys
from types import ModuleType

import numpy as np
import pytest
from contract.whole import SoloContract

from tagi_ddp.communicators.single import SingleCommunicator


@pytest.mark.ranks("single", 1)
class TestSingle(SoloContract):
    """Without any peer."""


def test_arrays_are_taken_while_another_thread_imports_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # without a Tensor yet
    SingleCommunicator().all_reduce(np.ones(3))
