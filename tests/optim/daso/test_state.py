"""DASO takes a state as a whole, or says what differs and is left as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.rank_pool import RankPool
from torch import nn

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.optim.daso import DASO

ARGUMENTS: dict[str, Any] = {
    "total_epochs": 9,
    "warmup_epochs": 2,
    "cooldown_epochs": 2,
    "stability_level": 0.5,
    "max_global_skips": 2,
    "skip_reduction_factor": 3,
    "local_skip_factor": 1,
    "local_weight": 1.0,
}


def trained(comm: Any, width: int = 3, groups: int = 1, model: bool = True, **more: Any) -> DASO:
    """Return a DASO after two batches, the second of which has sent a copy."""
    net = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    halves = [list(net[0].parameters()), [*net[1].parameters(), *net[2].parameters()]]
    params = [{"params": half} for half in halves] if groups == 2 else net.parameters()
    options = {"total_epochs": 10, "comm": comm, "warmup_epochs": 0, "node_size": 1, **more}
    daso = DASO(torch.optim.SGD(params, 0.1, momentum=0.9), **options)
    if model:
        daso.set_model(net)
    daso.last_batch = 16
    for _ in range(2):
        net(torch.randn(4, 3)).square().sum().backward()
        daso.step()
    return daso


def refused(daso: DASO, other: DASO) -> str:
    """Return why the state of the other one is refused; nothing of it is loaded."""
    before = daso.state_dict()
    state = other.state_dict()
    state["batch"] = 7
    with pytest.raises(ValueError, match="state has") as error:
        daso.load_state_dict(state)
    torch.testing.assert_close(daso.state_dict(), before, rtol=0, atol=0)
    daso.close()
    other.close()
    return str(error.value)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_other_arguments(name: str) -> None:
    comm, value = SingleCommunicator(), ARGUMENTS[name]
    text = refused(trained(comm), trained(comm, **{name: value}))
    assert text.startswith(f"state has {name}: {value}, this DASO ")


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"width": 5}, "state has parameter 0 of group 0: [5, 3], this DASO [3, 3]; give"),
    "groups": ({"groups": 2}, "state has parameter 0 of group 1: [3], this DASO none; give"),
    "model": ({"model": False}, "state has buffer or other parameter 0: none, this DASO [3]; give"),
    "cast": ({"downcast_type": torch.float}, "state has vectors of [('torch.float32', 28, [])]"),
}


@pytest.mark.parametrize(
    ("name", "node_size"),
    [(name, size) for name in OTHERS for size in (1, 2) if (name, size) != ("cast", 2)],
)
def test_other_models(shm: RankPool, name: str, node_size: int) -> None:
    def task(comm: Any) -> str:
        options = {"node_size": node_size}
        return refused(trained(comm, **options), trained(comm, **options, **OTHERS[name][0]))

    for text in shm.run(task, size=2):
        assert OTHERS[name][1] in text
