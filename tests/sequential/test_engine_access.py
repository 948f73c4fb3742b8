"""The two ways to the memory of the engine give the same."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
from support.networks import NETWORKS, fresh, learn, parameters
from support.rank_pool import RankPool
from support.reports import wrap

from tagi_ddp import (
    DDPConfig,
    DDPSequential,
)


def through_public_interface(comm: Any, name: str, monkeypatched: str) -> tuple[str, str]:
    os.environ["TAGI_DDP_ENGINE_ACCESS"] = monkeypatched
    try:
        model = wrap(comm, name, average=False, compute="engine")
    finally:
        del os.environ["TAGI_DDP_ENGINE_ACCESS"]
    for step in range(3):
        with model.no_sync():
            learn(model, *NETWORKS[name].batch(20 * step + comm.rank, 6))
            learn(model, *NETWORKS[name].batch(20 * step + comm.rank + 10, 7))
        model.step()
    return type(model._local.replica).__name__, repr(parameters(model))


@pytest.mark.parametrize("name", ["mlp", "resnet", "lstm", "layer_norm"])
def test_both_ways_to_the_engine_give_the_same(shm: RankPool, name: str) -> None:
    memory = shm.run(through_public_interface, name, "memory", size=2)
    public = shm.run(through_public_interface, name, "public", size=2)
    assert [kind for kind, _ in memory + public] == ["InPlace"] * 2 + ["Copied"] * 2
    assert len({state for _, state in memory + public}) == 1


def test_public_interface_cannot_write_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "public")
    with pytest.raises(RuntimeError, match=r"layer 1 \(BatchNorm2d\(\)\).*running statistics"):
        DDPSequential(fresh("batch_norm"), DDPConfig([], "auto"))


def test_unknown_layout_falls_back_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from tagi_ddp.engine import pointers
    from tagi_ddp.replica import host

    def unknown() -> None:
        raise pointers.LayoutError("mu_w is elsewhere")

    monkeypatch.setattr(host, "find_layout", unknown)
    with pytest.warns(RuntimeWarning, match="mu_w is elsewhere") as record:
        model = DDPSequential(fresh("mlp"), DDPConfig([], "auto"), compute="engine")
    assert len(record) == 1
    assert isinstance(model._local.replica, host.Copied)
    monkeypatch.setenv("TAGI_DDP_ENGINE_ACCESS", "memory")
    with pytest.raises(pointers.LayoutError), warnings.catch_warnings():
        DDPSequential(fresh("mlp"), DDPConfig([], "auto"))
