"""The error of products in lower precision, and the options that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.networks import NETWORKS, distance, fresh, learn, parameters

from tagi_ddp.sequential import accelerate


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "autoencoder"])
def test_bfloat16_costs_three_digits(name: str) -> None:
    states = []
    for precision in ("float32", "bfloat16"):
        model = accelerate(fresh(name), precision=precision)
        learn(model, *NETWORKS[name].batch(0, 16))
        mean, variance = model.get_outputs()
        model.step()
        states.append(({"outputs": 2 * [mean, variance]}, parameters(model)))
    exact, rounded = states
    outputs, after = (distance(a, b) for a, b in zip(rounded, exact, strict=True))
    assert 1e-4 < outputs < 0.03
    assert 1e-5 < after < 0.03


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "float16"}, "float16"),
        ({"precision": "tf32", "compute": "engine"}, "tf32"),
        ({"compute": "numpy"}, "numpy"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        accelerate(fresh("mlp"), **options)


def test_tf32_changes_nothing_on_a_cpu() -> None:
    x, _ = NETWORKS["cnn"].batch(0, 8)
    ours, exact = (accelerate(fresh("cnn"), precision=p)(x) for p in ("tf32", "float32"))
    np.testing.assert_array_equal(ours, exact)
