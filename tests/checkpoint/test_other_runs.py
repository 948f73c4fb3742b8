"""The checkpoints of another network, sampler, batch size or set of parts are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.networks import fresh
from torch.utils.data import DataLoader, TensorDataset

from tagi_ddp import DistributedSampler, accelerate, prepare
from tagi_ddp.checkpoint import CheckpointError, Checkpoints

LAYER = r"layer saved as 0 \(Linear\(12,32\)\) is 0 \(\w+\([\d,]+\)\) in this network"


def other_mlps() -> list[Any]:
    """Return the network of NETWORKS["mlp"] with a layer more, and with another activation."""
    from pytagi.nn import Linear, ReLU, Sequential, Tanh

    dense = Linear(12, 32), Linear(32, 24), Linear(24, 5)
    first, second = (
        Sequential(dense[0], kind(), dense[1], Tanh(), dense[2], *more)
        for kind, more in ((ReLU, [ReLU()]), (Tanh, []))
    )
    return [first, second]


def test_another_run(tmp_path: Path) -> None:
    """A folder of another network, sampler or set of parts is refused, and nothing is loaded."""
    one = accelerate(fresh("mlp"))
    with Checkpoints(tmp_path, one, sampler=DistributedSampler(10, 1, 0)) as checkpoints:
        checkpoints.save(1)
    other = accelerate(fresh("layer_norm"))
    deeper, activated = (accelerate(network) for network in other_mlps())
    before = other.check_replicas()
    for parts, sampler, text in [
        (other, DistributedSampler(10, 1, 0), LAYER),
        (deeper, DistributedSampler(10, 1, 0), r"layer saved as none is 5 \(ReLU"),
        (activated, DistributedSampler(10, 1, 0), r"layer saved as 1 \(ReLU\(\)\) is 1 \(Tanh"),
        (one, DistributedSampler(11, 1, 0), "sampler is .*'length': 11.*, and was .*10"),
        (one, None, "sampler is None now"),
        ({"a": one}, DistributedSampler(10, 1, 0), r"parts is \['a'\] now, and was \['model'\]"),
    ]:
        with (
            Checkpoints(tmp_path, parts, sampler=sampler) as checkpoints,
            pytest.raises(CheckpointError, match=f"{text}.* folder is '{tmp_path}'"),
        ):
            checkpoints.resume()
    assert other.check_replicas() == before


def drawn(sampler: DistributedSampler, way: str, size: int) -> int:
    """Return how many batches of a size a way of drawing gives."""
    if way == "batches":
        return len(sampler.batches(size))
    return len(list(sampler.steps(size, 1)))


@pytest.mark.parametrize("way", ["batches", "steps", "loader"])
@pytest.mark.parametrize("sizes", [(50, 100), (100, 50)])
def test_steps_are_counted_in_batches_of_one_size(
    tmp_path: Path, way: str, sizes: tuple[int, int]
) -> None:
    """Another size is refused at the first draw, or by resume() if that was before."""

    def begin(size: int) -> tuple[DistributedSampler, Callable[[], int]]:
        if way == "loader":
            loader = prepare(
                DataLoader(TensorDataset(torch.ones(200, 1)), size), num_replicas=1, rank=0
            )
            return loader.sampler, lambda: len(list(loader))
        sampler = DistributedSampler(200, 1, 0)
        return sampler, lambda: drawn(sampler, way, size)

    model, (before, after) = accelerate(fresh("mlp")), sizes
    sampler, draw = begin(before)
    with Checkpoints(tmp_path, model, sampler=sampler) as checkpoints:
        assert checkpoints.resume() == 0
        assert draw() == 200 // before
        checkpoints.save(1)
    text = f"global_batch_size is {after}, but the run that was resumed had {before}"
    for early in (False, True):
        sampler, draw = begin(after)
        with Checkpoints(tmp_path, model, sampler=sampler) as checkpoints:
            if early:
                draw()
                with pytest.raises(CheckpointError, match=text):
                    checkpoints.resume()
            else:
                assert checkpoints.resume() == 1
                with pytest.raises(ValueError, match=text):
                    draw()
    sampler, draw = begin(before)
    with Checkpoints(tmp_path, model, sampler=sampler) as checkpoints:
        assert checkpoints.resume() == 1
        assert draw() == 200 // before
        assert len(sampler.batches(after)) == 200 // after  # as for evaluation
        checkpoints.save(2)
        assert checkpoints.resume() == 2
    assert sampler.batch_sizes == sorted(sizes)
