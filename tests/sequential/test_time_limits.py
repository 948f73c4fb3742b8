"""The time limit of a user's choice: of a config, the trainer and the estimators."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytagi.nn import Linear, Sequential

from tagi_ddp import DDPConfig, DDPSequential, LaunchError, launch
from tagi_ddp.parallel import GaussianLoss, ParallelMixin, Task
from tagi_ddp.sklearn import TAGIRegressor

X = np.random.default_rng(0).standard_normal((40, 3), np.float32)
Y = X.sum(1, keepdims=True)
LATE = "did not come within 5 s; its process lives, and its last call was "


def script() -> None:
    with DDPSequential(
        Sequential(Linear(3, 1)), DDPConfig.from_env(timeout=5), average=False
    ) as model:
        rank = model.communicator.rank
        for epoch in range(2):
            model.learn(X[rank::2], Y[rank::2], 0.1)
            if rank == 0 and epoch == 0:
                time.sleep(30)  # as a long evaluation


class Slow(Task):
    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        if state.num_steps == 1 and model.communicator.rank == 0:
            time.sleep(30)
        return model(batch[0])

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        return GaussianLoss(model, output, batch[1], 0.1)


def trainer(folder: str) -> None:
    settings = {"name": "slow", "exp_dir": folder, "parallel": {"timeout": 5}}
    with ParallelMixin(settings) as trainer:
        trainer.train(Slow(), Sequential(Linear(3, 1)), (X, Y), epochs=2, batch_size=20)


def test_a_script(tmp_path: Path) -> None:
    """The text says what the late rank did last, and how to wait longer."""
    with pytest.raises(LaunchError) as caught:
        launch(script, 2, timeout=60)
    text = str(caught.value)
    assert "Timeout: step #" in text
    assert f"rank 0 {LATE}step #" in text
    assert "if it is only slow, raise timeout= of DDPConfig.from_env or init." in text


@pytest.mark.slow
def test_the_trainer(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=f"rank 0 {LATE}"):
        launch(trainer, 2, args=(str(tmp_path),), timeout=60)


def test_estimators() -> None:
    estimator = TAGIRegressor(n_ranks=2, timeout=1e-6, max_iter=1)
    with pytest.raises(LaunchError, match="did not come within 1e-06 s"):
        estimator.fit(X, Y.ravel())
