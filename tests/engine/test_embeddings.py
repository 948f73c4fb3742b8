"""Embedding layers draw their means by the engine's seed."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytagi
import pytest
from pytagi.nn import Embedding, Linear, Sequential

from tagi_ddp.launcher.pickling import dumps


def means(layer: Embedding) -> list[float]:
    return layer._cpp_backend.mu_w


@pytest.mark.parametrize("seed", [0, 1, -3, 2**31 - 1, np.int64(5)])
def test_the_same_seed_draws_the_same(seed: int) -> None:
    drawn = []
    for _ in range(2):
        pytagi.manual_seed(seed)
        one, other = Embedding(5, 3), Embedding(5, 3)
        drawn.append([means(one), means(other)])
        one.init_weight_bias()
        drawn[-1].append(means(one))
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn[0]}) == 3


def test_the_distribution_is_the_engines() -> None:
    """Normal, with the deviation ``scale``, which is what the variances say."""
    pytagi.manual_seed(0)
    layer = Embedding(2000, 50, scale=2.5)
    values = np.array(means(layer)) / 2.5
    assert set(layer._cpp_backend.var_w) == {6.25}
    moments = [(values**power).mean() for power in (1, 2, 3, 4)]
    np.testing.assert_allclose(moments, [0, 1, 0, 3], atol=0.15)


def test_other_layers_draw_what_they_drew() -> None:
    pytagi.manual_seed(3)
    alone = Linear(4, 2)._cpp_backend.mu_w
    pytagi.manual_seed(3)
    Embedding(9, 2)
    assert Linear(4, 2)._cpp_backend.mu_w == alone


def test_what_a_user_has_set_stays() -> None:
    pytagi.manual_seed(0)
    layer = Embedding(3, 2, 1)
    values = [float(n) for n in range(6)]
    layer._cpp_backend.mu_w = values
    network = Sequential(layer, Linear(2, 1))
    pytagi.manual_seed(1)
    state = network.state_dict()
    assert state["Embedding.0"][0] == values
    state["Embedding.0"] = (values[::-1], *state["Embedding.0"][1:])
    network.load_state_dict(state)
    assert network.state_dict()["Embedding.0"][0] == values[::-1]


def test_before_a_seed_every_process_draws_anew() -> None:
    code = "from pytagi.nn import Embedding; print(Embedding(2, 1)._cpp_backend.mu_w)"
    command = [sys.executable, "-c", code]
    said = {subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)}
    assert len(said) == 2


def test_the_seeding_travels_by_name() -> None:
    assert pickle.loads(dumps(pytagi.manual_seed)) is pytagi.manual_seed
