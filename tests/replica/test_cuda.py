"""A replica in the memory of the engine's CUDA layers, on stand-ins with the host's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda_stand_in import FIRST_BATCH, POINTERS, DeviceMemory, Network
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tagi_ddp import _backend
from tagi_ddp.communicators import Buffer
from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.engine.layers import DELTAS, PARAMETERS
from tagi_ddp.engine.pointers import LayoutError
from tagi_ddp.replica import cuda_memory
from tagi_ddp.replica.cuda_memory import CudaMemory


@pytest.fixture
def network() -> Network:
    return Network()


def cpu_parameters(network: Network) -> tuple[_backend.Parameters, list[dict[str, np.ndarray]]]:
    """Return the backend's own parameters over copies of a network's arrays."""
    parameters, copies = _backend.Parameters(), []
    for index, leaf in enumerate(network.leaves):
        arrays = {
            name: leaf.on_device.get(name, np.empty(0, np.float32)).copy()
            for name in PARAMETERS + DELTAS
        }
        blocks = [
            [arrays[name + part] for name in ("mu", "var", "delta_mu", "delta_var")]
            for part in ("_w", "_b")
        ]
        counter = np.zeros(1, np.int32)
        parameters.add_layer(str(index), *blocks, counter)
        copies.append({**arrays, "counter": counter})
    return parameters, copies


def check(network: Network, expected: list[dict[str, np.ndarray]]) -> None:
    for leaf, arrays in zip(network.leaves, expected, strict=True):
        for name, array in leaf.on_device.items():
            if name in PARAMETERS:
                np.testing.assert_allclose(array, arrays[name], rtol=1e-6, atol=1e-6)
            elif name in DELTAS:
                np.testing.assert_array_equal(array, arrays[name])


@pytest.mark.parametrize("divisor", [1, 3])
def test_bucket(network: Network, divisor: int) -> None:
    replica = network.replica()
    for array in network.memory.arrays:
        array *= 1.5  # the engine's backward, and more
    cpu, expected = cpu_parameters(network)
    replica.pull()
    assert replica.parameters.blocks == cpu.blocks
    buckets = [np.empty(2 * cpu.size, np.float32) for _ in range(2)]
    for parameters, bucket in zip((cpu, replica.parameters), buckets, strict=True):
        parameters.pack(bucket)
    np.testing.assert_array_equal(*buckets)
    for parameters in (cpu, replica.parameters):
        parameters.apply(buckets[0], divisor, 0.5)
    replica.updated()
    check(network, expected)
    assert replica.parameters.negative_variances == cpu.negative_variances
    assert sum(cpu.negative_variances)


def test_alone(network: Network) -> None:
    replica = network.replica()
    cpu, expected = cpu_parameters(network)
    replica.pull()
    with SingleCommunicator() as communicator:
        agreement = replica.agree(communicator, _backend.Contribution(7), average=False)
    assert not agreement.all_finished()
    assert replica.take_refused(everything=True) == []
    cpu.apply_own(_backend.cap_factor(7))
    check(network, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_not_finite_is_refused(network: Network, value: float) -> None:
    replica = network.replica()
    network.norms[1].on_device["delta_var_b"][2] = value
    before = network.on_device()
    replica.pull()
    assert replica.parameters.first_not_finite() == "number 4 of those with parameters"
    with SingleCommunicator() as communicator:
        replica.agree(communicator, _backend.Contribution(7), average=False)
    assert replica.take_refused(everything=True) == [0]
    for array, then in zip(network.memory.arrays, before, strict=True):
        np.testing.assert_array_equal(array, then)


def test_micro_batches(network: Network) -> None:
    replica = network.replica()
    replica.pull()
    flags = [not layer.accumulates for layer in replica.layers]
    sums = replica.zeros()
    replica.parameters.add_deltas_to(sums, flags)
    replica.parameters.add_to_deltas(sums, flags)
    twice = replica.parameters.deltas.clone()
    replica.pull()
    torch.testing.assert_close(twice, 2 * replica.parameters.deltas)
    assert twice.any()


def test_running_statistics(network: Network) -> None:
    replica = network.replica()
    for norm in network.norms:
        norm.on_device["var_ra"] += 1  # a forward pass
    replica.pull()
    statistics = replica.statistics
    values = np.concatenate([n.on_device[s] for n in network.norms for s in ("mu_ra", "var_ra")])
    packed = statistics.packed(3)
    np.testing.assert_array_equal(packed, 3 * values)
    statistics.unpack(packed, 2)
    replica.updated()
    after = np.concatenate([n.on_device[s] for n in network.norms for s in ("mu_ra", "var_ra")])
    np.testing.assert_allclose(after, 1.5 * values, rtol=1e-6)
    assert [norm.bytes[FIRST_BATCH] for norm in network.norms] == [0, 0, 0]


def test_export_and_push(network: Network) -> None:
    replica = network.replica()
    for array in network.memory.arrays:
        array *= 2  # a step, and a forward pass
    replica.export()
    for leaf in network.leaves:
        for name in leaf.on_device.keys() & leaf.host.keys() - set(DELTAS):
            np.testing.assert_array_equal(leaf.host[name], leaf.on_device[name])
    deltas = network.linear.on_device["delta_mu_w"].copy()
    for _, array in replica.state():
        if array.dtype == np.float32:
            array += 1
    replica.push()
    for leaf in network.leaves:
        for name in leaf.on_device.keys() & leaf.host.keys() - set(DELTAS):
            np.testing.assert_array_equal(leaf.host[name], leaf.on_device[name])
    np.testing.assert_array_equal(network.linear.on_device["delta_mu_w"], deltas)


class Rank1(SingleCommunicator):
    """A rank whose buffers live on a device, and who gets what it has, and 1 more, from rank 0."""

    device = "cuda:3"

    def broadcast(
        self,
        buffer: Buffer,
        root: int = 0,
        *,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> None:
        buffer += 1


@pytest.mark.parametrize(("communicator", "more"), [(SingleCommunicator, 0), (Rank1, 1)])
def test_share(
    network: Network, communicator: Callable[[], SingleCommunicator], more: float
) -> None:
    replica = network.replica()
    before = [{name: a.copy() for name, a in leaf.on_device.items()} for leaf in network.leaves]
    replica.share(communicator())
    for leaf, arrays in zip(network.leaves, before, strict=True):
        for name, array in arrays.items():
            expected = array if name in DELTAS else array + np.float32(more)
            np.testing.assert_array_equal(leaf.on_device[name], expected)


def test_moved_arrays_are_followed(network: Network) -> None:
    replica = network.replica()
    replica.pull()
    version = replica.version
    moved = network.memory.new(np.full(18, 7))
    network.leaves[1].point(POINTERS + 8 * 4, moved)  # as loading a file does
    replica.pull()
    assert replica.version != version
    begin, count = replica.parameters.blocks[2]
    assert replica.parameters.deltas[begin : begin + count].tolist() == [7] * 18
    replica.pull()
    assert replica.version == version + 1
    network.leaves[1].write(POINTERS + 8 * 4, "<u8", 0)
    with pytest.raises(LayoutError, match=r"delta_mu_w .*null"):
        replica.pull()


class Watch(TorchDispatchMode):
    """Counts what torch does with a device's memory, and refuses what is not ordered."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()
        self.memory, self.count = memory, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if (
                isinstance(value, torch.Tensor)
                and value.numel()
                and self.memory.owns(value.data_ptr(), value.numel())
            ):
                assert self.memory.is_ordered, f"{function} is not ordered"
                self.count += 1
        return function(*args, **(kwargs or {}))


def test_all_that_touches_the_engines_memory_is_ordered(network: Network) -> None:
    with Watch(network.memory) as watch, SingleCommunicator() as communicator:
        replica = network.replica()
        for act in (
            replica.pull,
            replica.updated,
            replica.push,
            replica.export,
            lambda: replica.agree(communicator, _backend.Contribution(7), average=False),
            lambda: replica.share(communicator),
        ):
            before = watch.count
            act()
            assert watch.count > before


class Stream:
    """A stream of torch that tells what it is told to wait for."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: Stream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("same", [True, False])
def test_streams(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    events: list[str] = []
    engine = Stream("engine", events)
    current = engine if same else Stream("current", events)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: engine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(cuda_memory, "find_device", lambda number: None)
    with CudaMemory(0).ordered():
        events.append("work")
    waits = [[], []] if same else [["current waits for engine"], ["engine waits for current"]]
    assert events == [*waits[0], "work", *waits[1]]
