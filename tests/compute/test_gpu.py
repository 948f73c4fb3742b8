"""What holds on a GPU; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import NETWORKS, SIGMA_V, distance, fresh, learn, parameters

from tagi_ddp import NotFiniteError, OutputUpdater, accelerate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
DEVICE = "cuda:0"


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_engine(name: str) -> None:
    engine, ours = accelerate(fresh(name), "engine"), accelerate(fresh(name), "torch", DEVICE)
    for step in range(5):
        for model in (engine, ours):
            learn(model, *NETWORKS[name].batch(step, 20))
            model.step()
    assert distance(parameters(ours), parameters(engine)) < 1e-4


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", NETWORKS)
def test_steps_do_not_wait(name: str, request: pytest.FixtureRequest) -> None:
    model = accelerate(fresh(name), device=DEVICE)
    updater = OutputUpdater(model)
    x, y = (torch.from_numpy(a).to(DEVICE) for a in NETWORKS[name].batch(0, 20))
    noise = torch.full_like(y, SIGMA_V**2)

    def step() -> None:
        model(x)
        updater.update(y, noise)
        model.backward()
        model.step()

    step()  # the first one loads kernels
    request.getfixturevalue("waiting_is_an_error")
    for _ in range(3):
        step()


def test_refused_step_is_told_later() -> None:
    model = accelerate(fresh("mlp"), device=DEVICE)
    x, y = NETWORKS["mlp"].batch(0, 6)
    before = model.check_replicas()
    learn(model, np.full_like(x, np.inf), y)
    model.step()
    assert model.check_replicas() == before  # waits for the device
    learn(model, x, y)
    with pytest.raises(NotFiniteError, match="earlier step"):
        model.step()


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_precision_leaves_torchs_own_alone(precision: Any) -> None:
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)
    before = [switch.fp32_precision for switch in switches]
    x, _ = NETWORKS["cnn"].batch(0, 8)
    exact = accelerate(fresh("cnn"), "engine")(x)
    ours = accelerate(fresh("cnn"), device=DEVICE, precision=precision)(x)
    allowed = {"float32": 1e-5, "tf32": 1e-2, "bfloat16": 3e-2}[precision]
    for theirs, mine in zip(exact, ours, strict=True):
        assert np.linalg.norm(mine - theirs) < allowed * np.linalg.norm(theirs)
    assert [switch.fp32_precision for switch in switches] == before
