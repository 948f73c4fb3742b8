"""Workers that are forked while the thread of a checkpoint writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pytagi.nn import Linear, Sequential
from torch.utils.data import DataLoader, TensorDataset

from tagi_ddp import accelerate, prepare
from tagi_ddp.checkpoint import Checkpoints


@pytest.mark.parametrize("epochs", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_epochs_beside_a_writing_thread(tmp_path: Path, epochs: int) -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": "fork", "timeout": 60}
    data = DataLoader(TensorDataset(x, x[:, :1]), 4, **workers)
    loader = prepare(data, num_replicas=1, rank=0)
    step = 0
    with accelerate(Sequential(Linear(3, 1))) as model:
        model.learn(np.ones((1, 3), np.float32), np.ones((1, 1), np.float32), 1.0)
        with Checkpoints(tmp_path, model) as checkpoints:
            for epoch in range(epochs):
                loader.set_epoch(epoch)
                for inputs, targets in loader:  # Workers are forked here.
                    model.learn(inputs.numpy(), targets.numpy(), 0.1)
                    step += 1
                    checkpoints.save(step)
            checkpoints.wait()
            assert checkpoints.resume() == step == 2 * epochs
