"""One task, learned by a torch module or a TAGI network, by any number of processes: settings say.

python examples/trainer.py model=torch
tagi-ddp run -n 2 examples/trainer.py model=tagi parallel.use_fsdp=true

The results are those of one process. Settings.from_yaml(path) reads settings from a file.
"""

import sys
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytagi
import torch
from images import load_images
from pytagi.nn import Linear, ReLU, Sequential
from torch import nn

from tagi_ddp.parallel import GaussianLoss, ParallelMixin, Task, TrainerParallelConfig

CLASSES, HIDDEN = 10, 128
NOISE = 0.1  # variance of the observations, which are 0 and 1


@dataclass
class Settings(TrainerParallelConfig):
    name: str = "digits"
    exp_dir: str = "runs"
    model: str = "tagi"  # or "torch"
    epochs: int = 10
    batch_size: int = 32  # of all ranks together


class Recognize(Task):
    """Say which digit an image shows; no line asks how many ranks there are."""

    def run_model(self, model, batch, state):
        images, _ = batch
        return model(images)

    def compute_loss(self, model, batch, state, output):
        _, labels = batch
        if isinstance(output, torch.Tensor):
            return nn.functional.mse_loss(output, labels)
        return GaussianLoss(model, output, labels, NOISE)


def torch_net(pixels):
    torch.manual_seed(0)
    hidden = [nn.Linear(pixels, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(HIDDEN, CLASSES))


def tagi_net(pixels):
    pytagi.manual_seed(0)
    hidden = [Linear(pixels, HIDDEN), ReLU(), Linear(HIDDEN, HIDDEN), ReLU()]
    return Sequential(*hidden, Linear(HIDDEN, CLASSES))


def recognized(net, images):
    """Return what a plain network takes each image for."""
    if isinstance(net, nn.Module):
        return net(torch.as_tensor(images)).argmax(1).numpy()
    means, _ = net(images.ravel())
    return means.reshape(len(images), CLASSES).argmax(1)


def main():
    settings = Settings.from_args(sys.argv[1:])
    make, optimizer = {
        "torch": (torch_net, partial(torch.optim.Adam, lr=3e-3)),
        "tagi": (tagi_net, None),  # its updates need none
    }[settings.model]
    data = load_images("digits")
    images, tests = (each.reshape(len(each), -1) for each in (data.x_train, data.x_test))
    labels = np.eye(CLASSES, dtype=np.float32)[data.y_train]
    task = Recognize()
    with ParallelMixin(settings) as trainer:
        losses = trainer.train(
            task,
            make(images.shape[1]),
            (images, labels),
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            optimizer=optimizer,
        )
    if trainer.rank == 0:  # the checkpoint is whole, however many ranks had parts of the network
        net = make(images.shape[1])
        trainer.load_checkpoint(task, net)
        error = np.mean(recognized(net, tests) != data.y_test)
        where = f"{settings.model}, {trainer.world_size} process(es)"
        print(f"{where}: loss {losses[-1]:.4f}, test error {error:.2%}")


if __name__ == "__main__":
    main()
