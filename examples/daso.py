"""Train a torch network on images by DASO: nodes that seldom wait for one another.

tagi-ddp run -n 4 examples/daso.py --node-size 2
mpirun -n 8 --host a:4,b:4 python examples/daso.py --data fashion-mnist
"""

import argparse

import numpy as np
import torch
from images import DATASETS, load_images
from torch import nn

import tagi_ddp
from tagi_ddp import DistributedSampler, progress, reduce_metrics
from tagi_ddp.optim import DASO, DataParallelMultiGPU

CLASSES = 10


def network(side):
    return nn.Sequential(
        nn.Unflatten(1, (1, side, side)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (side // 4) ** 2, CLASSES)),
    )


def train(comm, data, options):
    torch.manual_seed(comm.rank)  # all begin with rank 0's parameters
    model = network(data.side)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    daso = DASO(
        optimizer,
        options.epochs,
        comm,
        warmup_epochs=1,
        cooldown_epochs=1,
        max_global_skips=options.max_global_skips,
        node_size=options.node_size,
    )
    net = DataParallelMultiGPU(model, daso)
    x, y = torch.from_numpy(data.x_train), torch.from_numpy(data.y_train).long()
    sampler = DistributedSampler(x, comm.size, comm.rank, uneven="drop")
    with daso:
        for epoch in (bar := progress(range(options.epochs), unit="epoch")):
            sampler.set_epoch(epoch)
            # Equally many batches on all ranks, of equally many images.
            batches = np.array(
                list(sampler)[: len(sampler) // options.batch_size * options.batch_size]
            )
            batches = batches.reshape(-1, options.batch_size)
            daso.last_batch = len(batches)
            total = 0.0
            for share in batches:
                daso.zero_grad()
                loss = nn.functional.cross_entropy(net(x[share]), y[share])
                loss.backward()
                daso.step()
                total += loss.item()
            bar.set_postfix_str(f"every {daso.global_skip} batches")
            daso.epoch_loss_logic(total / len(batches))  # may change how often nodes exchange
    return model


@torch.inference_mode()
def test(comm, model, data):
    model.eval()
    share = np.arange(len(data.y_test))[comm.rank :: comm.size]
    predicted = model(torch.from_numpy(data.x_test[share])).argmax(1).numpy()
    return reduce_metrics(comm, np.sum(predicted != data.y_test[share]), len(share))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="of each rank")
    parser.add_argument("--max-global-skips", type=int, default=8)
    parser.add_argument("--node-size", type=int, help="ranks of a node; default: those of a host")
    options = parser.parse_args()
    with tagi_ddp.init() as comm:
        data = load_images(options.data)
        error = test(comm, train(comm, data, options), data)
        if comm.rank == 0:
            print(f"test error {error:.2%}")


if __name__ == "__main__":
    main()
