"""Tests of steps on a GPU; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import NETWORKS, SIGMA_V, distance, fresh, learn, parameters

from compute.test_output_updater import INPUTS, WAYS, network, observations
from compute.test_step_graphs import CAPTURED
from tagi_ddp import NotFiniteError, OutputUpdater, accelerate
from tagi_ddp.replica.device_agreement import LAG

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


@pytest.mark.parametrize("way", WAYS)
def test_output_updater(way: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, INPUTS)).astype(np.float32)
    seen = observations(rng, way, 4)
    last = "EvenExp" if way == "update_heteros" else ""
    engine, ours = accelerate(network(last), "engine"), accelerate(network(last), "torch", DEVICE)
    for model, device in ((engine, "cpu"), (ours, DEVICE)):
        model(x)
        given = {name: torch.from_numpy(values).to(device) for name, values in seen.items()}
        getattr(OutputUpdater(model), way)(**given)
        model.backward()
        model.step()
    assert distance(parameters(ours), parameters(engine)) < 1e-4


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
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
    for _ in range(LAG + 2):  # the last ones look at the first one's outcome, which has arrived
        step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", CAPTURED)
def test_graphs_of_steps(name: str, request: pytest.FixtureRequest) -> None:
    """They learn what steps one by one do, and nobody waits; two sizes of batches."""
    plain, graphs = (
        accelerate(fresh(name), device=DEVICE, cuda_graph=graph) for graph in (False, True)
    )
    batches = [
        [torch.from_numpy(a).to(DEVICE) for a in NETWORKS[name].batch(step, 20 - step % 2)]
        for step in range(LAG + 12)
    ]

    def learn_all(model: Any, some: slice) -> list[Any]:
        return [model.learn(x, y, SIGMA_V**2) for x, y in batches[some]]

    first, then = slice(0, 10), slice(10, None)  # all is captured in the first ones
    expected = learn_all(plain, first) + learn_all(plain, then)
    outputs = learn_all(graphs, first)
    request.getfixturevalue("waiting_is_an_error")
    outputs += learn_all(graphs, then)
    torch.cuda.set_sync_debug_mode("default")
    assert len(graphs._training.graphs._graphs) == 2
    for ours, theirs in zip(outputs, expected, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.shape == other.shape
            # Not each element: cuDNN adds up in any order, which differs from run to run.
            assert torch.linalg.vector_norm(mine - other) < 1e-4 * torch.linalg.vector_norm(other)
    assert distance(parameters(graphs), parameters(plain)) < 1e-5


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


def test_refused_step_is_told_later() -> None:
    model = accelerate(fresh("mlp"), device=DEVICE)
    x, y = NETWORKS["mlp"].batch(0, 6)
    before = model.check_replicas()

    def refuse() -> None:
        learn(model, np.full_like(x, np.inf), y)
        model.step()

    refuse()
    with pytest.raises(NotFiniteError, match="earlier step"):
        model.check_replicas()  # waits for the device
    assert model.check_replicas() == before
    refuse()
    for _ in range(LAG - 1):
        learn(model, x, y)
        model.step()
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
