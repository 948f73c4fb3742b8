"""Checks of arguments of pytagi's output updater, which would read foreign memory without them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytagi
import pytest
import torch
from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

from tagi_ddp import DDPSequential, accelerate

BATCH, OUTPUTS = 4, 6
COMPUTES = pytest.mark.parametrize("compute", ["engine", "torch"])
ALL_COMPUTES = pytest.mark.parametrize("compute", ["engine", "native", "torch"])


def network(compute: Any) -> DDPSequential:
    pytagi.manual_seed(7)
    return accelerate(Sequential(Linear(3, 5), ReLU(), Linear(5, OUTPUTS)), compute)


def call(model: DDPSequential, method: str, *arrays: Any) -> None:
    getattr(OutputUpdater("cpu"), method)(
        model.output_z_buffer, *arrays, model.input_delta_z_buffer
    )


def floats(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


WRONG = [
    ("update", (floats(23), floats(24)), "mu_obs has 23 elements, not 24"),
    ("update", (floats(24), floats(6)), "var_obs has 6 elements, not 24"),
    ("update", (floats(0), floats(24)), "mu_obs has 0 elements, not 24"),
    ("update", (floats(0), floats(0)), "mu_obs has 0 elements, not 24"),
    ("update_heteros", (floats(0),), "mu_obs has 0 elements, not 12"),
    ("update_heteros", (floats(24),), "mu_obs has 24 elements, not 12"),
    (
        "update_using_indices",
        (floats(8), floats(8), np.ones(9, np.int32)),
        "selected_idx has 9 elements, no multiple of the 4 samples",
    ),
    (
        "update_using_indices",
        (floats(7), floats(8), np.ones(8, np.int32)),
        "mu_obs has 7 elements, not 8",
    ),
    (
        "update_using_indices",
        (floats(8), floats(8), np.arange(8, dtype=np.int32)),
        "selected_idx has numbers from 0 to 7, but outputs are numbered from 1 to 6",
    ),
]


@COMPUTES
@pytest.mark.parametrize(("method", "arrays", "text"), WRONG)
def test_sizes_are_checked(compute: str, method: str, arrays: Any, text: str) -> None:
    model = network(compute)
    model(floats(3 * BATCH))
    with pytest.raises(ValueError, match=text):
        call(model, method, *arrays)


@COMPUTES
def test_lists_do_and_texts_do_not(compute: str) -> None:
    model = network(compute)
    model(floats(3 * BATCH))
    call(model, "update", [0.5] * 24, [0.1] * 24)
    model.backward()
    model.step()
    with pytest.raises(TypeError, match="mu_obs must be an array of numbers, got an array of d"):
        call(model, "update", np.array([object()] * 24), floats(24))


@ALL_COMPUTES
@pytest.mark.parametrize(
    "number", [np.float32(0.25), np.array(0.25), torch.tensor(0.25), np.array(0.25, np.float16)]
)
def test_one_number_is_for_all(compute: str, number: Any) -> None:
    learned = []
    for noise in (0.25, number):
        model = network(compute)
        model.learn(floats(3 * BATCH), floats(24), noise)
        learned.append(model.check_replicas())
    assert learned[0] == learned[1]


@ALL_COMPUTES
def test_what_is_masked_was_not_observed(compute: str) -> None:
    learned = []
    mask = np.arange(24) % 5 == 0
    for observed in (np.ma.masked_array(floats(24), mask), np.where(mask, np.nan, floats(24))):
        model = network(compute)
        model.learn(floats(3 * BATCH), observed, 0.25)
        learned.append(model.check_replicas())
    assert learned[0] == learned[1]


@ALL_COMPUTES
@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        (torch.arange(8), "from 0 to 7, but outputs are numbered from 1 to 6"),
        (np.full(8, 1.7), "selected_idx must be whole numbers, got an array of float64"),
    ],
)
def test_numbers_of_outputs_are_checked(compute: str, numbers: Any, text: str) -> None:
    model = network(compute)
    with pytest.raises((ValueError, TypeError), match=text):
        model.learn(floats(3 * BATCH), floats(8), floats(8), numbers)


@ALL_COMPUTES
def test_other_floats_and_arrays_that_cannot_be_written(compute: str) -> None:
    learned = []
    given: list[Any] = [floats(24), torch.ones(24, dtype=torch.bfloat16), floats(24)]
    given[2].flags.writeable = False
    for observed in given:
        model = network(compute)
        model.learn(floats(3 * BATCH), observed, 0.25)
        learned.append(model.check_replicas())
    assert learned == [learned[0]] * 3


@COMPUTES
def test_an_empty_share_has_no_outputs(compute: str) -> None:
    """Before the first batch of samples and after it, whose outputs are not taken for its own."""
    model = network(compute)
    for samples in (0, BATCH, 0):
        model(floats(3 * samples))
        call(model, "update", floats(OUTPUTS * samples), floats(OUTPUTS * samples))
        call(model, "update_heteros", floats(OUTPUTS * samples // 2))
        model.backward()
        model.step()
    model(floats(0))
    with pytest.raises(RuntimeError, match="output_states is empty"):
        call(model, "update", floats(24), floats(24))


@COMPUTES
def test_outputs_need_a_forward(compute: str) -> None:
    model = network(compute)
    with pytest.raises(RuntimeError, match=r"no outputs before a forward\(\)"):
        model.get_outputs()
    with pytest.raises(RuntimeError, match=r"forward\(\)"):
        call(model, "update", floats(24), floats(24))


@COMPUTES
def test_deltas_of_another_network(compute: str) -> None:
    model, small = network(compute), accelerate(Sequential(Linear(3, 1)), compute)
    for each in (model, small):
        each(floats(3 * BATCH))
    with pytest.raises(ValueError, match=r"delta_states has room for \d+ of 24 outputs"):
        OutputUpdater("cpu").update(
            model.output_z_buffer, floats(24), floats(24), small.input_delta_z_buffer
        )
