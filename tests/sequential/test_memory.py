"""Training for long takes no more memory than training for a while."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.rank_pool import RankPool

from tagi_ddp import DDPSequential

pytestmark = pytest.mark.slow


def resident() -> int:
    """Return this process's memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def train_and_watch_memory(comm: Any, compute: Any, steps: int) -> list[int]:
    """Return how much the memory grows in each quarter of the steps, after some to begin with."""
    from pytagi.nn import Linear, OutputUpdater, ReLU, Sequential

    network = Sequential(Linear(3, 8), ReLU(), Linear(8, 2))
    updater, x, y = OutputUpdater("cpu"), np.ones(12, np.float32), np.ones(8, np.float32)
    with DDPSequential(network, communicator=comm, compute=compute) as model:
        sizes = []
        for step in range(1000 + steps):
            if step >= 1000 and (step - 1000) % (steps // 4) == 0:
                sizes.append(resident())
            model(x)
            updater.update(model.output_z_buffer, y, y, model.input_delta_z_buffer)
            model.backward()
            model.step()
        sizes.append(resident())
        return np.diff(sizes).tolist()


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer keeps what was freed"
)
@pytest.mark.parametrize(
    ("pool", "compute", "steps"),
    [("shm", "engine", 20_000), ("shm", "torch", 2_000), ("gloo", "engine", 800)],
    indirect=["pool"],
)
def test_memory_is_flat(pool: RankPool, compute: str, steps: int) -> None:
    for growths in pool.run(train_and_watch_memory, compute, steps, size=2, limit=120):
        # A leak is in all of them; threads take their first memory in one or another.
        assert min(growths) < 1 << 14, growths
