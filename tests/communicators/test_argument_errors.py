"""Argument errors of shm, which C++ raises, and of the other backends read the same."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from contract.arguments import CASES, MISALIGNED
from contract.data import caught

from tagi_ddp.communicators.shm import ShmCommunicator
from tagi_ddp.communicators.single import SingleCommunicator

# C++ names no dtype that it does not know, and the bindings refuse None first.
OTHER_TEXTS = {"none", "complex", "bool", "swapped bytes"}
ALL = CASES | MISALIGNED


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Any, Any]]:
    with (
        ShmCommunicator(0, 1, "one", secrets.token_hex(8), 10.0) as shm,
        SingleCommunicator() as single,
    ):
        yield shm, single


@pytest.mark.parametrize("case", sorted(set(ALL) - OTHER_TEXTS))
def test_texts_are_equal(both: tuple[Any, Any], case: str) -> None:
    shm, single = (str(caught(lambda comm=comm: ALL[case][1](comm))) for comm in both)
    assert single == shm


def test_counts_that_do_not_fit_in_memory(both: tuple[Any, Any]) -> None:
    array = np.zeros(1, np.float32)
    for comm in both:
        with pytest.raises(ValueError, match=str(1 << 70)):
            comm.reduce_scatter(array, array.copy(), [1 << 70])
