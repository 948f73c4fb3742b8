"""Runs that can be interrupted after any step: what tests of checkpoints train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from support.networks import NETWORKS, fresh, learn

from tagi_ddp import DDPSequential, DistributedSampler
from tagi_ddp.checkpoint import Checkpoints
from tagi_ddp.optim import SyncSchedule

LENGTH, BATCH, EPOCHS = 44, 12, 3
PER_EPOCH = 4
STEPS = PER_EPOCH * EPOCHS

# By name: the network, and the options of DDPSequential.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "sums": ("mlp", {"average": False}),
    "means": ("resnet", {}),
    "engine": ("mlp", {"compute": "engine"}),
    "torch": ("cnn", {"compute": "torch", "average": False}),
    "sharded": ("mlp", {"sharded": True}),
    "embedding": ("embedding", {"average": False}),
    "lstm": ("lstm", {"average": False}),
    "merges": ("mlp", {"reduction": "precision", "sync_every": 3}),
    "merges by Bayes": ("mlp", {"reduction": "precision", "sync_every": 3, "merge": "bayes"}),
    "merges in 8 bits": ("mlp", {"reduction": "precision", "sync_every": 2, "compress": "int8"}),
    "merges, batch norm": ("resnet", {"reduction": "precision", "sync_every": 5}),
    "merges, torch": ("mlp", {"reduction": "precision", "sync_every": 3, "device": "cpu:0"}),
    "nodes": ("mlp", {"reduction": "precision", "sync_every": 3, "node_size": 2}),
    "in flight": ("mlp", {"reduction": "precision", "node_size": 2}),
    "schedule": ("mlp", {"reduction": "precision", "node_size": 2, "compress": "bf16"}),
}


class Run:
    """A run of all steps, which saves after those it is told, and goes on from the last."""

    def __init__(
        self, comm: Any, name: str, folder: str, device: str | None = None, **options: Any
    ) -> None:
        self.network, given = RUNS[name]
        if device is not None:
            given = {**given, "compute": "torch", "device": device}
        self.schedule = None
        if name in ("schedule", "in flight"):
            self.schedule = SyncSchedule(EPOCHS, 0, 1, max_global_skips=4)
            given = {**given, "sync_every": self.schedule}
        self.model = DDPSequential(fresh(self.network), communicator=comm, **given)
        self.sampler = DistributedSampler(LENGTH, comm.size, comm.rank, seed=3)
        self.rng = np.random.default_rng(comm.rank)
        self.checkpoints = Checkpoints(
            folder,
            self.model,
            sampler=self.sampler,
            generators={"noise": self.rng},
            **options,
        )
        self.x, self.y = NETWORKS[self.network].batch(0, LENGTH)
        self.noisy = not NETWORKS[self.network].categories

    def go(self, save_after: Iterable[int] = (), until: int = STEPS, noise: float = 0.1) -> str:
        """Train from the last checkpoint on; return the hash of all replicas after a merge."""
        model, saves = self.model, set(save_after)
        first = self.checkpoints.resume()
        for step, share in self.sampler.steps(BATCH, EPOCHS, first):
            if step == until:
                return ""
            if self.schedule is not None and step % PER_EPOCH == 0:
                model.begin_epoch(PER_EPOCH)
            x = self.x[share]
            if self.noisy and noise:
                x = x + noise * self.rng.standard_normal(x.shape, np.float32)
            learn(model, x, self.y[share])
            model.step()
            if self.schedule is not None and step % PER_EPOCH == PER_EPOCH - 1:
                model.end_epoch(1.0)
            if step + 1 in saves:
                self.checkpoints.save(step + 1, {"step": step, "rank": model.communicator.rank})
        if model.reduction == "precision":
            model.merge()
        return model.check_replicas()
