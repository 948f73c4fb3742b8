"""Steps on a GPU wait for nothing; those that a stand-in can take, too, are in test_device.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.networks import NETWORKS, SIGMA_V, distance, fresh, parameters
from support.waiting import no_waiting

from tagi_ddp import OutputUpdater, accelerate
from tagi_ddp.replica.device_agreement import LAG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
DEVICE = "cuda:0"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_do_not_wait(name: str) -> None:
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
    with no_waiting():
        for _ in range(LAG + 2):  # the last ones look at the first one's outcome, which has arrived
            step()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch finds one GPU")
@pytest.mark.parametrize("graph", [False, True])
def test_on_another_than_the_current_device(graph: bool) -> None:
    engine = accelerate(fresh("mlp"), "engine")
    ours = accelerate(fresh("mlp"), device="cuda:1", cuda_graph=graph)
    for step in range(LAG + 4):
        x, y = NETWORKS["mlp"].batch(step, 20)
        engine.learn(x, y, SIGMA_V**2)
        ours.learn(*(torch.from_numpy(a).to("cuda:1") for a in (x, y)), SIGMA_V**2)
    assert torch.cuda.current_device() == 0
    ours.check_replicas()
    assert distance(parameters(ours), parameters(engine)) < 1e-4


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
