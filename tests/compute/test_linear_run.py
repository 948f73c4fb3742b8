"""Linear layers in a row, which the backend's kernels compute in small batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytagi
import pytest
import torch

from compute.oracle import Both
from tagi_ddp.compute import native
from tagi_ddp.compute.linear_run import LinearRun
from tagi_ddp.compute.network import Network
from tagi_ddp.compute.states import Deltas


def layers() -> list[Any]:
    """Return layers of which the fourth to the sixth are a run, and the tenth is one alone."""
    from pytagi import nn

    return [
        nn.Conv2d(1, 3, 3, in_width=6, in_height=6),
        nn.ReLU(),
        nn.AvgPool2d(2, 2),
        nn.Linear(12, 9),
        nn.Tanh(),
        nn.Linear(9, 8, bias=False),
        nn.ReLU(),
        nn.LayerNorm([8]),
        nn.ReLU(),
        nn.Linear(8, 2),
        nn.ReLU(),
    ]


def networks() -> tuple[Both, Both]:
    """Return the same network by torch alone, and with the kernels."""
    both = []
    for kernels in (False, True):
        pytagi.manual_seed(3)
        both.append(Both(*layers(), kernels=kernels))
    return both[0], both[1]


def runs_of(network: Network) -> list[tuple[int, LinearRun]]:
    return [(i, each) for i, each in enumerate(network._layers) if isinstance(each, LinearRun)]


def test_runs_begin_and_end_with_linear_layers() -> None:
    alone, with_kernels = networks()
    assert runs_of(alone.network) == []
    found = runs_of(with_kernels.network)
    assert [(i, len(run.parts())) for i, run in found] == [(3, 3), (7, 1)]


@pytest.mark.parametrize("exact", [True, False])
def test_all_batches_are_as_by_torch_alone(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In turn by kernels and by torch, down to the innovation of the inputs."""
    monkeypatch.setattr(native, "limit", lambda *_: 8.0)
    alone, with_kernels = networks()
    rng = np.random.default_rng(0)
    natively = []
    for batch in (5, 9, 1, 8):
        mean = torch.from_numpy(rng.normal(size=(batch, 36)).astype(np.float32))
        variance = None if exact else torch.from_numpy(rng.random((batch, 36), np.float32))
        given = torch.from_numpy(rng.normal(size=(2, batch, 2)).astype(np.float32))
        results: list[Any] = []
        told: list[list[int]] = []
        for each in (alone, with_kernels):
            states = each.network.forward(mean, variance, training=True)
            begins: list[int] = []
            deltas = Deltas(given[0].clone(), given[1].clone())
            below = each.network.backward(deltas, True, begins.append)
            assert sorted(begins, reverse=True) == begins
            assert begins[-1] == 0
            assert states.variance is not None
            told.append(begins)
            parts = [states.mean, states.variance, below.mean, below.variance, each.deltas]
            results.append([part.clone() for part in parts])
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.std()))
        (_, run), _ = runs_of(with_kernels.network)
        natively.append(run.computed() == [run])
        assert len(told[1]) == len(told[0]) - 2 * natively[-1]  # all of a run at once
        assert set(told[1]) <= set(told[0])
    assert natively == [True, False, True, True]
