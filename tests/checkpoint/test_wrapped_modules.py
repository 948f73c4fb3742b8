"""A module that torch.compile or DistributedDataParallel wraps loads what another one has saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tagi_ddp.checkpoint import CheckpointError, Checkpoints, read_tree
from tagi_ddp.checkpoint.module_states import fitted, state_of
from tagi_ddp.communicators.single import SingleCommunicator


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """A group of one rank, which DistributedDataParallel needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def distributed(module: nn.Module) -> Any:
    return DistributedDataParallel(module)


class Net(nn.Module):
    """Has names that contain those of the wrappers, an old version, and a shared part."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = self.again = nn.Linear(4, 1)

    def get_extra_state(self) -> Any:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"steps": 3}


def net(wraps: str) -> Any:
    made: Any = Net()
    made.module[1].running_mean.uniform_()
    for wrap in wraps.split():
        match wrap:
            case "inner":
                made.module[0] = compiled(made.module[0])
            case "part":
                made.module = compiled(made.module)
            case "shared":
                made.head = compiled(made.head)
            case "compile":
                made = compiled(made)
            case "ddp":
                made = distributed(made)
            case "dp":
                made = nn.DataParallel(made)
    return made


WRAPS = ["", "compile", "ddp", "ddp compile", "inner part shared compile ddp", "compile dp", "part"]


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.product(WRAPS, WRAPS)))
def test_any_wrap_loads_any_other(saved: str, loaded: str) -> None:
    one, other = net(saved), net(loaded)
    state = state_of(one)
    assert state.keys() == net("").state_dict().keys()
    assert state._metadata["module.1"] == {"version": 2}
    mine = fitted(other, state)
    assert mine.keys() == other.state_dict().keys()
    assert {name for name in mine._metadata if name.endswith("1")} == {
        name for name in other.state_dict()._metadata if name.endswith("1")
    }
    other.load_state_dict(mine)
    own = state_of(other)
    assert all(torch.equal(own[name], state[name]) for name in own if name != "_extra_state")
    if saved == loaded:  # as an earlier version has saved it
        other.load_state_dict(fitted(other, one.state_dict()))
        assert fitted(net(""), net("compile").state_dict()).keys() == state.keys()


def test_checkpoints_of_a_wrapped_part(tmp_path: Path) -> None:
    one, other, comm = net("inner ddp compile"), net(""), SingleCommunicator()
    with Checkpoints(tmp_path, {"net": one}, communicator=comm) as checkpoints:
        checkpoints.save(1)
    names = read_tree(tmp_path / "latest" / "rank-0.safetensors", "parts", "net").keys()
    assert names == other.state_dict().keys()
    with Checkpoints(tmp_path, {"net": other}, communicator=comm) as checkpoints:
        assert checkpoints.resume() == 1
    assert torch.equal(other.head.weight, state_of(one)["head.weight"])
    strange = compiled(nn.Linear(1, 1))
    with (
        Checkpoints(tmp_path, {"net": strange}, communicator=comm) as checkpoints,
        pytest.raises(CheckpointError, match=r"net has .* only in"),
    ):
        checkpoints.resume()


class Extra(nn.Module):
    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    made = nn.Linear(1, 1)
    made.register_buffer("held", tensor)
    return made


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Extra({1}), "parts/a/_extra_state is a set"),
        (nn.Sequential(Extra([print])), "parts/a/0._extra_state/0 is a builtin_function"),
        (with_buffer(torch.ones(2).to_sparse()), "parts/a/held is a tensor of .*sparse_coo"),
        (with_buffer(torch.ones(2, device="meta")), "parts/a/held is a tensor of torch.float32"),
        (
            torch.optim.SGD([{"params": [torch.ones(1)], "odd": {1}}], 0.1),
            "parts/a/param_groups/0/odd is a set",
        ),
    ],
)
def test_what_cannot_be_saved_is_named_at_once(tmp_path: Path, part: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Checkpoints(tmp_path, {"a": part}, communicator=SingleCommunicator())


def test_a_check_of_what_comes_later(tmp_path: Path) -> None:
    part = Extra(1)
    lazy = nn.LazyLinear(1)  # which has no numbers yet
    parts = {"a": part, "lazy": lazy}
    with Checkpoints(tmp_path, parts, communicator=SingleCommunicator()) as checkpoints:
        lazy(torch.ones(1, 2))
        checkpoints.check()
        part.state = {1}
        with pytest.raises(CheckpointError, match="parts/a/_extra_state is a set"):
            checkpoints.check()
        part.state = 2
        checkpoints.save(1)
    assert [path.name for path in tmp_path.glob("*-step-*")] == ["000001-step-1"]
