"""Fits a module by Lightning over gloo, then over our backend, on the ranks of a launcher."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import tagi_ddp.parallel  # noqa: F401  (registers)


class Task(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(5, 3)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 0.05)


def fit(backend: str) -> tuple[list[torch.Tensor], float]:
    pl.seed_everything(1, verbose=False)
    task, data = Task(), TensorDataset(torch.randn(64, 5))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend=backend),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = [parameter.detach().clone() for parameter in task.parameters()]
    trainer.fit(task, DataLoader(data, batch_size=8))
    assert dist.get_backend() == backend
    dist.destroy_process_group()
    after = [parameter.detach() for parameter in task.parameters()]
    assert not torch.equal(before[0], after[0])
    return after, float(trainer.callback_metrics["loss_epoch"])


torch.testing.assert_close(fit("tagi_ddp"), fit("gloo"))
print("equal")
