"""Programs as users write them, for type checkers: misspelt names are errors, right ones are not.

`make lint` runs mypy on this file, which reports a "type: ignore" that hides no error. pyright does
so as well: tests/project/test_types.py.
"""

import numpy as np

import tagi_ddp
import tagi_ddp.optim


def misspelt(model: tagi_ddp.DDPSequential, x: np.ndarray) -> None:
    model.lern(x, x)  # type: ignore[attr-defined]
    model.layer  # type: ignore[attr-defined]  # noqa: B018
    tagi_ddp.lern  # type: ignore[attr-defined]  # noqa: B018
    tagi_ddp.checkpoints  # type: ignore[attr-defined]  # noqa: B018
    tagi_ddp.checkpoint.Checkpoint  # type: ignore[attr-defined]  # noqa: B018
    tagi_ddp.optim.DAS0  # type: ignore[attr-defined]  # noqa: B018
    tagi_ddp.accelerate(None).lern(x)  # type: ignore[attr-defined]


def right(model: tagi_ddp.DDPSequential, x: np.ndarray) -> None:
    model.learn(x, x, 0.01)
    names = [layer.get_layer_info() for layer in model.layers]
    model.save_csv(model.get_layer_stack_info() + names[0])
    with tagi_ddp.checkpoint.Checkpoints("run", model) as checkpoints:
        checkpoints.resume()
    tagi_ddp.sklearn.TAGIRegressor().fit(x, x)
    tagi_ddp.optim.SyncSchedule  # noqa: B018
    tagi_ddp.optim.DASO  # noqa: B018
    tagi_ddp.parallel.dp, tagi_ddp.strategy.mixture, tagi_ddp.sharding.shard_tensor  # noqa: B018
    tagi_ddp.plan.predict, tagi_ddp.communicators.Work, tagi_ddp.data.share_of  # noqa: B018
