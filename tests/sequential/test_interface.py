"""Calls that pass through to the engine, and a world of one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.networks import NETWORKS, after_series, distance, fresh, last_step, learn, parameters
from support.rank_pool import RankPool
from support.reports import set_delta_variances, wrap

from tagi_ddp import (
    CommunicatorError,
    DDPConfig,
    DDPSequential,
    OutputUpdater,
    accelerate,
)


def save_and_load(comm: Any, name: str, folder: str) -> list[str]:
    path = str(Path(folder) / "model.bin")
    model = wrap(comm, name)
    learn(model, *NETWORKS[name].batch(comm.rank, 8))
    model.step()
    state = model.state_dict()
    model.save(path)
    model.barrier()
    digests = [model.check_replicas()]
    learn(model, *NETWORKS[name].batch(comm.rank, 8))
    model.step()
    digests.append(model.check_replicas())
    if comm.rank == 1:
        path = "only rank 0 reads"
    model.load(path)
    digests.append(model.check_replicas())
    learn(model, *NETWORKS[name].batch(comm.rank, 8))
    model.step()
    model.load_state_dict(state if comm.rank == 0 else {})
    return [*digests, str(state == model.state_dict())]


@pytest.mark.parametrize("name", ["mlp", "cnn", "autoencoder"])
def test_save_and_load(shm: RankPool, name: str, tmp_path: Path) -> None:
    for saved, changed, loaded, same in shm.run(save_and_load, name, str(tmp_path), size=2):
        assert saved == loaded != changed
        assert same == "True"


def make_variances_negative(comm: Any, compute: str) -> dict[str, int]:
    model = wrap(comm, "resnet", average=False, compute=compute)
    x, y = NETWORKS["resnet"].batch(comm.rank, 4)
    learn(model, x, y)
    inner = model.model._cpp_backend.layers[2].main_block.layers[0]
    set_delta_variances(model, inner, [-1e9] * 7 + [0.0] * (inner.num_weights - 7))
    inner.var_w = [1e-8] * inner.num_weights
    model._local.accumulation.samples = 1  # a cap factor of 0.1 lets the variance fall below 0
    model.step()
    return model.get_neg_var_w_counter()


@pytest.mark.parametrize("compute", ["engine", "torch"])
def test_negative_variances_are_counted(shm: RankPool, compute: str) -> None:
    for counts in shm.run(make_variances_negative, compute, size=1):
        assert counts["Conv2d(4,6,8,8,3)"] == 7
        assert counts["Linear(96,5)"] == 0


@pytest.mark.parametrize("steps", [1, 4])
def test_lstm_states(steps: int) -> None:
    import pytagi
    from pytagi.nn import LSTM, Linear, Sequential

    answers = []
    for compute in ("engine", "torch"):
        pytagi.manual_seed(3)
        model = accelerate(
            Sequential(LSTM(2, 3, seq_len=steps, **last_step()), Linear(after_series(3, steps), 2)),
            compute,
        )
        x, y = np.ones((1, 2 * steps)), np.ones((1, 2))
        outputs = []
        for _ in range(2):
            learn(model, x, y)
            model.step()
        states = model.get_lstm_states()
        learn(model, x, y)
        outputs.append(model.get_outputs())
        model.set_lstm_states(states)
        outputs.append(model(x))
        model.reset_lstm_states()
        outputs.append(model(x))
        assert list(states) == [0]
        answers.append([*outputs, tuple(np.concatenate([np.ravel(a) for a in states[0]]))])
    for ours, engines in zip(*answers, strict=True):
        np.testing.assert_allclose(ours, engines, rtol=1e-4, atol=1e-6)


def interface(comm: Any) -> None:
    model = wrap(comm)
    x, _ = NETWORKS["mlp"].batch(0, 3)
    mean, variance = model(x)
    assert mean.shape == variance.shape == (15,)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_outputs(), model(x), strict=True))
    noisy = model.forward(x, np.full_like(x, 0.1))[1]
    assert (noisy > variance).all()
    model.output_to_host()
    assert model.get_device_with_index() == "cpu:0"
    assert model.output_z_buffer.block_size == 3
    model.output_z_buffer = model.output_z_buffer
    model.input_delta_z_buffer = model.input_delta_z_buffer
    model.eval()
    assert not model.model._cpp_backend.layers[0].training
    model.train()
    assert model.model._cpp_backend.layers[0].training
    model.barrier()


def test_interface(shm: RankPool) -> None:
    shm.run(interface, size=2)


def threads(comm: Any, chosen: int | None) -> tuple[int, int]:
    network = fresh("resnet")
    if chosen:
        network.set_threads(chosen)
    DDPSequential(network, communicator=comm)
    inner = network._cpp_backend.layers[2].main_block.layers[0]
    return network._cpp_backend.layers[0].num_threads, inner.num_threads


@pytest.mark.parametrize("chosen", [None, 1, 3, 4])
def test_threads(shm: RankPool, chosen: int | None) -> None:
    expected = chosen or max(1, len(os.sched_getaffinity(0)) // 2)
    assert shm.run(threads, chosen, size=2) == [(expected, expected)] * 2


def test_torch_computes_with_all_cores() -> None:
    """Threads of torch are the process's; the engine's layers have as many."""
    import torch

    before = torch.get_num_threads()
    network = fresh("mlp")
    accelerate(network, compute="torch")
    cores = len(os.sched_getaffinity(0))
    assert torch.get_num_threads() == network._cpp_backend.layers[0].num_threads == cores
    torch.set_num_threads(before)


def threads_in_a_part(comm: Any) -> int:
    """Return the threads of a network on this rank alone, one of two that a launcher started."""
    numbers = {"RANK": comm.rank, "WORLD_SIZE": 2, "LOCAL_RANK": comm.rank, "LOCAL_WORLD_SIZE": 2}
    launcher = {f"TAGI_DDP_{name}": str(number) for name, number in numbers.items()}
    with mock.patch.dict(os.environ, launcher), comm.split(comm.rank) as group:
        return threads(group, None)[0]


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) != os.cpu_count() or os.cpu_count() == 1,
    reason="needs two cores or more, and to be allowed to use them all",
)
def test_threads_of_ranks_in_other_groups(shm: RankPool) -> None:
    assert shm.run(threads_in_a_part, size=2) == [os.cpu_count() // 2] * 2


@pytest.mark.parametrize("backend", ["auto", "shm", "mpi", "gloo"])
def test_world_of_one(backend: str) -> None:
    with DDPSequential(fresh("mlp"), DDPConfig([], backend)) as model:
        start = parameters(model)
        learn(model, *NETWORKS["mlp"].batch(0, 8))
        model.step()
        assert distance(start, parameters(model)) > 1e-4
        assert model.communicator.backend == "single"
        assert len(model.check_replicas()) == 64


def test_neither_config_nor_communicator() -> None:
    with pytest.raises(TypeError, match="config or communicator"):
        DDPSequential(fresh("mlp"))


@pytest.mark.parametrize("compute", ["engine", "native", "torch"])
def test_innovation_of_another_networks_outputs(compute: str) -> None:
    """Of as many inputs as the batch has, whatever batches came before."""
    from pytagi.nn import Linear, ReLU, Sequential

    first = accelerate(Sequential(Linear(3, 7), ReLU()), compute=compute)
    second = accelerate(Sequential(Linear(7, 4), ReLU(), Linear(4, 2)), compute=compute)
    second.input_state_update = True
    for batch in (5, 3, 5, 2, 6):
        first(np.ones((batch, 3)))
        second(first.output_z_buffer)
        with pytest.raises(RuntimeError, match="input_state_update"):
            second.get_input_states()
        OutputUpdater(second).update(np.ones((batch, 2)), np.ones((batch, 2)))
        second.backward()
        mean, variance = second.get_input_states()
        assert mean.size == variance.size == batch * 7
        shown = second.output_delta_z_buffer
        np.testing.assert_array_equal(mean, np.array(shown.delta_mu[: mean.size], np.float32))


def even_exp(comm: Any, samples: int, width: int) -> Any:
    import pytagi
    from pytagi.nn import EvenExp, Linear, Sequential

    pytagi.manual_seed(2)
    net = Sequential(Linear(3, width), EvenExp())
    x, y = np.ones((4 * samples, 3), np.float32), np.ones((4 * samples, width), np.float32)
    x *= np.arange(len(x), dtype=np.float32)[:, None] / 10
    share = slice(comm.rank * len(x) // comm.size, (comm.rank + 1) * len(x) // comm.size)
    with DDPSequential(net, communicator=comm, average=False) as model:
        try:
            model.learn(x[share], y[share], 1.0)
        except (ValueError, CommunicatorError) as error:
            return type(error).__name__
        return parameters(model)


def test_even_exp_of_an_odd_width(shm: RankPool) -> None:
    """Elements are counted through the batch: an odd share would swap those of the next one."""
    for size, samples, width in ((2, 1, 3), (4, 2, 3), (4, 1, 4)):
        (alone,) = shm.run(even_exp, samples, width, size=1)
        for found in shm.run(even_exp, samples, width, size=size):
            assert distance(found, alone) < 1e-5
    assert "ValueError" in shm.run(even_exp, 1, 3, size=4)


def joins_a_group(comm: Any) -> str:
    """Belong to another group, as in an elastic job."""
    from pytagi.nn import EvenExp, Linear, Sequential

    model = accelerate(Sequential(Linear(3, 3), EvenExp()))
    model(np.ones((3, 3)))
    model._ranks.communicator = comm
    with pytest.raises(ValueError, match="even number of samples") as caught:
        model(np.ones((3, 3)))
    return str(caught.value)


def test_even_exp_of_a_rank_that_joins_others(shm: RankPool) -> None:
    assert len(shm.run(joins_a_group, size=2, fresh=True)) == 2


def test_even_exp_in_micro_batches() -> None:
    from pytagi.nn import EvenExp, Linear, Sequential

    model = accelerate(Sequential(Linear(3, 3), EvenExp()))
    model(np.ones((3, 3)))
    with model.no_sync():
        model(np.ones((2, 3)))
        with pytest.raises(ValueError, match="even number of samples"):
            model(np.ones((3, 3)))


def test_states_of_other_layers_and_sizes_are_refused() -> None:
    from pytagi.nn import LSTM, Linear, Sequential

    model = accelerate(Sequential(LSTM(2, 3, seq_len=1), Linear(3, 1)))
    model(np.ones((1, 2)))
    states = model.get_lstm_states()
    with pytest.raises(ValueError, match="states has layer 1"):
        model.set_lstm_states({1: states[0]})
    with pytest.raises(ValueError, match=r"states\[0\] has parts of \[6\] elements, not 3"):
        model.set_lstm_states({0: tuple(np.ones(6, np.float32) for _ in range(4))})  # type: ignore[dict-item]


def test_networks_that_cannot_smooth_say_so() -> None:
    from pytagi.nn import SLSTM, Linear, Sequential, SLinear

    for compute in ("engine", "native"):
        for layers in (
            [SLSTM(2, 3, seq_len=1), Linear(3, 1)],
            [SLSTM(2, 3, seq_len=1), Linear(3, 4), SLinear(4, 1)],
        ):
            net = Sequential(*layers)
            net.num_samples = 2
            model = accelerate(net, compute)
            model.learn(np.ones((1, 2)), np.ones((1, 1)), 1.0)
            with pytest.raises(RuntimeError, match="needs SLSTM layers and, last, an SLinear"):
                model.smoother()
        net = Sequential(SLSTM(2, 3, seq_len=1), SLinear(3, 1))
        net.num_samples = 2
        model = accelerate(net, compute)
        with pytest.raises(RuntimeError, match="needs a series"):
            model.smoother()
        with pytest.raises(RuntimeError, match="before a smoother"):
            model.get_outputs_smoother()
        for _ in range(2):
            model.learn(np.ones((1, 2)), np.ones((1, 1)), 1.0)
        with pytest.raises(ValueError, match="more than num_samples = 2"):
            model.learn(np.ones((1, 2)), np.ones((1, 1)), 1.0)
        assert model.smoother()[0].size == 2
