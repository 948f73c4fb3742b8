"""A program for any launcher: wrap a torch module and a network, train both, print what came out.

``python wrap_everything.py FOLDER``: rank by rank into files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytagi
import torch
import torch.distributed as dist
from pytagi.nn import Linear, Sequential
from torch import nn

from tagi_ddp.data import DistributedSampler
from tagi_ddp.environment import detect
from tagi_ddp.parallel import GaussianLoss, ParallelConfig, dp


def share(*arrays: Any) -> list[Any]:
    [indices] = DistributedSampler(len(arrays[0]), shuffle=False).batches(len(arrays[0]))
    return [array[indices] for array in arrays]


def main() -> None:
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    x, y = share(x, np.sin(x.sum(1, keepdims=True)))
    pytagi.manual_seed(0)
    net = Sequential(Linear(3, 1))
    network = dp(net, ParallelConfig(use_fsdp=True))
    alone = dist.is_initialized()
    GaussianLoss(network, network(x), y, 0.1).backward()
    network.step()
    if network is not net:
        network.close()

    torch.manual_seed(detect().rank)  # rank 0's weights win
    linear = nn.Linear(3, 1)
    model = dp(linear, ParallelConfig())
    (model(torch.tensor(x)) - torch.tensor(y)).square().mean().backward()
    found = {
        "kinds": [type(network).__name__, type(model).__name__, alone],
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "gradient": linear.weight.grad.ravel().tolist(),
        "means": np.ravel(net.state_dict()["Linear.0"][0]).tolist(),
        "same": model is linear and network is net,
    }
    Path(sys.argv[1], f"{detect().rank} of {detect().world_size}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
