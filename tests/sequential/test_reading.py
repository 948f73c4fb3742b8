"""Reads between two calls change nothing that is trained, on any compute."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tagi_ddp
from sequential.test_rollback import CASES, GOOD, Program, difference
from tagi_ddp.communicators.single import SingleCommunicator

READS = (
    *("input_delta_z_buffer", "output_delta_z_buffer", "output_z_buffer", "num_samples", "layers"),
    *("get_outputs", "get_input_states", "get_lstm_states", "get_outputs_smoother", "state_dict"),
    *("get_neg_var_w_counter", "get_norm_mean_var", "parameters", "check_replicas"),
)


class Reader(Program):
    """A program that reads something between the calls of a step."""

    def __init__(self, *arguments: Any, reads: list[str]) -> None:
        super().__init__(*arguments, average=False)
        self._reads = reads
        self.model.input_state_update = True

    def read(self) -> None:
        for name in self._reads:
            with contextlib.suppress(RuntimeError):
                found = getattr(self.model, name)
                if callable(found):
                    found()
                elif hasattr(found, "delta_mu"):
                    np.array(found.delta_mu)

    def backward(self, x: Any, y: Any, noise: float) -> None:
        self.read()
        self.model(x)
        self.read()
        tagi_ddp.OutputUpdater(self.model).update(y, np.full_like(y, noise))
        self.read()
        self.model.backward()
        self.read()


@pytest.mark.parametrize(("name", "compute"), CASES)
@settings(max_examples=8)
@given(
    reads=st.lists(st.sampled_from(READS), min_size=1, max_size=3),
    events=st.lists(st.tuples(st.sampled_from(GOOD), st.integers(0, 2**31)), max_size=3),
)
def test_reading(name: str, compute: str, reads: list[str], events: list[tuple[str, int]]) -> None:
    states = []
    for what in (reads, []):
        program = Reader(name, compute, SingleCommunicator(), reads=what)
        for event, seed in [*events, ("by hand", 1)]:
            program.run(event, seed)
            program.read()
        states.append(copy.deepcopy(program.model.run_state()))
    assert not difference(*states)
