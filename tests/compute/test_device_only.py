"""A step on a device neither waits for it nor copies from the host.

Torch's device "meta" shows it without a GPU: whoever reads a tensor there fails, as it holds no
values. That leaves tensors of the host that an operation takes beside the device's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.engines import require_activation
from support.networks import NETWORKS, fresh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compute.test_activations import ELEMENTWISE, OVER_OUTPUTS, activation
from tagi_ddp import OutputUpdater, accelerate
from tagi_ddp._backend import Contribution
from tagi_ddp.replica.device import DeviceReplica
from tagi_ddp.replica.device_parameters import DeviceShards
from tagi_ddp.replica.host import attach

DEVICE = "meta"
BATCH = 20


class Watch(TorchDispatchMode):
    """Refuses tensors of the host, but single numbers, which travel with a kernel's arguments."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.dim():
                assert value.device.type == DEVICE, f"{function} on {value.device}"
        return result


def take_steps(net: Any, inputs: int, update: Callable[[OutputUpdater], None]) -> None:
    model = accelerate(net, "torch", DEVICE)
    updater = OutputUpdater(model)
    x = torch.empty(BATCH, inputs, device=DEVICE)

    def step() -> None:
        model(x)
        update(updater)
        model.backward()
        model.step()

    # The host waits where a refused step would have to undo what it keeps itself: that running
    # statistics have begun, and what size the batches of LSTM layers have.
    for flag in model._local.replica.statistics.flags:
        flag[0] = 0
    for lstm in model.compute.network.lstms.values():
        lstm._batch = BATCH
    step()  # the first one may prepare
    with Watch():
        for _ in range(2):
            step()


def update_all(outputs: int) -> Callable[[OutputUpdater], None]:
    y = torch.empty(BATCH, outputs, device=DEVICE)
    return lambda updater: updater.update(y, torch.ones_like(y))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    take_steps(fresh(name), NETWORKS[name].inputs, update_all(NETWORKS[name].outputs))


@pytest.mark.parametrize("kind", [*ELEMENTWISE, *OVER_OUTPUTS, "LeakyReLU"])
def test_activations(kind: str) -> None:
    require_activation(kind)
    from pytagi.nn import Linear, Sequential

    layers = [Linear(3, 8), activation(kind, 8), Linear(8, 4), activation(kind, 4)]
    take_steps(Sequential(*layers), 3, update_all(4))


def test_selected_outputs() -> None:
    from pytagi.nn import Linear, Sequential

    y = torch.empty(BATCH, 2, device=DEVICE)
    picks = torch.empty(BATCH, 2, dtype=torch.int32, device=DEVICE)
    take_steps(
        Sequential(Linear(3, 4)),
        3,
        lambda updater: updater.update_using_indices(y, torch.ones_like(y), picks),
    )


def test_unknown_noise() -> None:
    from pytagi.nn import EvenExp, Linear, Sequential

    y = torch.empty(BATCH, 2, device=DEVICE)
    take_steps(Sequential(Linear(3, 4), EvenExp()), 3, lambda updater: updater.update_heteros(y))


class Calls:
    """In place of NCCL's communicator: notes the operations, which nobody waits for."""

    rank, size, device = 1, 3, DEVICE

    def __init__(self) -> None:
        self.names: list[str] = []
        self._in_group = False

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self.names.append("group")
        self._in_group = True
        yield
        self._in_group = False

    def __getattr__(self, name: str) -> Any:
        def operation(*buffers: Any, async_op: bool = False) -> Calls:
            assert async_op or self._in_group or name == "order", f"{name} waits"
            self.names.append(name)
            return self

        return operation


@pytest.mark.parametrize("sharded", [False, True])
def test_exchange(sharded: bool) -> None:
    replica = DeviceReplica(attach(fresh("batch_norm")), torch.device(DEVICE))
    communicator: Any = Calls()
    shards = DeviceShards(replica.parameters, communicator) if sharded else None
    with Watch():
        replica.agree(communicator, Contribution(BATCH), average=False, shards=shards)
    agreed = ["all_reduce", "all_gather", "order"]  # running statistics, and the ranks' words
    if sharded:
        assert communicator.names == ["group", "reduce_scatter", *agreed, "all_gather", "order"]
    else:
        assert communicator.names == ["group", "all_reduce", *agreed]
