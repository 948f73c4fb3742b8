"""A replica on a device, a GPU or its stand-in "cpu:0", learns what one in place learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.networks import NETWORKS, distance, fresh, learn, parameters, parameters_and_averages
from support.rank_pool import RankPool

from compute.test_output_updater import INPUTS, WAYS, network, observations
from tagi_ddp import DDPSequential, NotFiniteError, OutputUpdater, accelerate
from tagi_ddp.replica.device_agreement import LAG

DEVICES = ("cpu", "cpu:0")  # in place, and as a GPU


@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_engine(name: str, accelerator: str) -> None:
    engine, ours = accelerate(fresh(name), "engine"), accelerate(fresh(name), "torch", accelerator)
    for step in range(5):
        for model in (engine, ours):
            learn(model, *NETWORKS[name].batch(step, 20))
            model.step()
    assert distance(parameters(ours), parameters(engine)) < 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_output_updater(way: str, accelerator: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, INPUTS)).astype(np.float32)
    seen = observations(rng, way, 4)
    last = "EvenExp" if way == "update_heteros" else ""
    engine, ours = (
        accelerate(network(last), "engine"),
        accelerate(network(last), "torch", accelerator),
    )
    for model, where in ((engine, "cpu"), (ours, accelerator)):
        model(x)
        given = {name: torch.from_numpy(values).to(where) for name, values in seen.items()}
        getattr(OutputUpdater(model), way)(**given)
        model.backward()
        model.step()
    assert distance(parameters(ours), parameters(engine)) < 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_one_process(name: str, tmp_path: Path) -> None:
    states = []
    for device in DEVICES:
        model = accelerate(fresh(name), device=device)
        for step in range(3):
            with model.no_sync():
                learn(model, *NETWORKS[name].batch(step, 6))
                learn(model, *NETWORKS[name].batch(step + 10, 5))
            model.step()
        first = model.check_replicas()
        outputs = model(NETWORKS[name].batch(9, 4)[0])
        model.save(str(tmp_path / "model"))
        state = model.state_dict()
        learn(model, *NETWORKS[name].batch(20, 6))
        model.step()
        changed = model.check_replicas()
        if name != "layer_norm":  # the engine's own file of it holds the last batch's statistics
            model.load(str(tmp_path / "model"))
            assert model.state_dict() == state
        model.load_state_dict(state)
        learn(model, *NETWORKS[name].batch(21, 6))
        model.step()
        states.append((parameters(model), {"outputs": 2 * list(outputs)}))
        assert first != changed
    for ours, in_place in zip(*states, strict=True):
        assert distance(ours, in_place) < 1e-5  # square roots differ in their last bit


def train_ranks_on(comm: Any, name: str, device: str, average: bool) -> dict[str, list[np.ndarray]]:
    model = DDPSequential(fresh(name), None, average, communicator=comm, device=device)
    with model.join():
        for step in range(2 + comm.rank):
            learn(model, *NETWORKS[name].batch(step + 10 * comm.rank, 5 + comm.rank))
            model.step()
    learn(model, *NETWORKS[name].batch(comm.rank, 5))
    model.step()
    model.check_replicas()
    return parameters_and_averages(model)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", ["mlp", "batch_norm"])
def test_ranks(shm: RankPool, name: str, average: bool) -> None:
    answers = [shm.run(train_ranks_on, name, device, average, size=3) for device in DEVICES]
    for in_place, on_device in zip(*answers, strict=True):
        assert distance(on_device, in_place) < 1e-5


def test_a_forward_alone_moves_running_statistics() -> None:
    means = []
    for device in DEVICES:
        model = accelerate(fresh("batch_norm"), device=device)
        model(NETWORKS["batch_norm"].batch(0, 6)[0])
        means.append(np.ravel(model.get_norm_mean_var()["BatchNorm2d()_1"][0]))
    np.testing.assert_allclose(means[1], means[0], rtol=1e-5)
    assert means[0].any()


def test_refused_step_is_told_later(accelerator: str) -> None:
    model = accelerate(fresh("mlp"), device=accelerator)
    x, y = NETWORKS["mlp"].batch(0, 6)
    learn(model, x, y)
    model.step()
    before = model.check_replicas()
    learn(model, np.where(x > 1, np.inf, x), y)
    model.step()
    with pytest.raises(NotFiniteError, match="earlier step"):
        model.check_replicas()
    assert model.check_replicas() == before
    learn(model, np.where(x > 1, np.inf, x), y)
    model.step()
    for _ in range(LAG - 1):
        learn(model, x, y)
        model.step()
    learn(model, x, y)
    with pytest.raises(NotFiniteError, match="earlier step"):
        model.step()
    assert model.check_replicas() != before


def test_refused_step_is_told_by_close() -> None:
    model = accelerate(fresh("mlp"), device="cpu:0")
    x, y = NETWORKS["mlp"].batch(0, 6)
    learn(model, x * np.inf, y)
    model.step()
    with pytest.warns(RuntimeWarning, match="refused"):
        model.close()


def test_refused_step_of_ranks(shm: RankPool) -> None:
    assert shm.run(refuse_a_step_of_one, size=2) == [(1,), (1,)]


def refuse_a_step_of_one(comm: Any) -> tuple[int, ...]:
    model = DDPSequential(fresh("mlp"), communicator=comm, device="cpu:0")
    x, y = NETWORKS["mlp"].batch(comm.rank, 6)
    before = model.check_replicas()
    learn(model, x * np.inf if comm.rank == 1 else x, y)
    with pytest.raises(NotFiniteError) as error:
        model.step()
    assert model.check_replicas() == before
    return error.value.ranks


def test_negative_variances_are_counted() -> None:
    model = accelerate(fresh("mlp"), device="cpu:0")
    learn(model, *NETWORKS["mlp"].batch(0, 6))
    parameters: Any = model._local.replica.parameters
    parameters.var[:7] = 1e-8
    parameters.deltas.chunk(2)[1][:7] = -1e9
    model._local.accumulation.samples = 1  # a cap factor of 0.1 lets the variance fall below 0
    model.step()
    assert list(model.get_neg_var_w_counter().values()) == [7, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_stay_tensors(device: str) -> None:
    models = [accelerate(fresh("mlp"), "torch", device) for _ in range(2)]
    x, y = NETWORKS["mlp"].batch(0, 6)
    variances = np.full(y.size, 0.25, np.float32)
    for model, kind in zip(models, (np.asarray, torch.from_numpy), strict=True):
        mean, variance = model(kind(x))
        assert type(mean) is type(variance) is type(kind(x))
        np.testing.assert_array_equal(mean, model.get_outputs()[0])
        OutputUpdater(model).update(kind(y), kind(variances))
        model.backward()
        model.step()
    assert models[0].check_replicas() == models[1].check_replicas()


@pytest.mark.parametrize("device", DEVICES)
def test_labels_and_one_number_for_the_noise(device: str) -> None:
    x, y = NETWORKS["mlp"].batch(0, 6)
    labels = np.rint(y).astype(np.int64)
    models = [accelerate(fresh("mlp"), "torch", device) for _ in range(2)]
    for model, kind in zip(models, (np.asarray, torch.from_numpy), strict=True):
        model.learn(kind(x), kind(labels), 0.25)
    assert models[0].check_replicas() == models[1].check_replicas()


def test_inputs_may_change_before_backward() -> None:
    digests = []
    for spoil in (False, True):
        model = accelerate(fresh("mlp"))
        x, y = NETWORKS["mlp"].batch(0, 6)
        mean, _ = model(x)
        OutputUpdater(model).update(y, np.full(y.size, 0.25))
        if spoil:
            x[:] = 0
            mean[:] = 0
        model.backward()
        model.step()
        digests.append(model.check_replicas())
    assert digests[0] == digests[1]


@pytest.mark.parametrize("device", ["cuda:99", "gpu"])
def test_unknown_device(device: str) -> None:
    with pytest.raises(ValueError, match=device):
        accelerate(fresh("mlp"), device=device)


@pytest.mark.parametrize("compute", ["engine", "native"])
@pytest.mark.parametrize("device", ["cuda:0", "mps"])
def test_devices_are_for_torch(compute: Any, device: str) -> None:
    told = rf"compute=\"{compute}\" is for the CPU .* device is '{device}' .* use compute=\"torch\""
    with pytest.raises(ValueError, match=told):
        accelerate(fresh("mlp"), compute=compute, device=device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_replica_cannot_be_moved(device: str) -> None:
    model = accelerate(fresh("mlp"), device=device)
    model.to_device(device)
    model.to_device("cpu")
    with pytest.raises(ValueError, match=f"got 'cuda:0', but the replica lives on {device}: "):
        model.to_device("cuda:0")
    learn(model, *NETWORKS["mlp"].batch(0, 6))
    model.step()
