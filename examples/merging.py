"""Compare ways to make one TAGI network of many replicas, on real images.

tagi-ddp run -n 4 examples/merging.py --node-size 2 --plot merging.png
mpirun -n 8 --host a:4,b:4 python examples/merging.py --data fashion-mnist

Every way trains on the same batches: by the sum of all deltas at every step, as one process; by
merging posteriors at every step, or every 8; and by a schedule, where nodes do not wait for one
another. The plot shows how much alike the ranks have learned before each merge of every step.
"""

import argparse
import time

import numpy as np
import pytagi
from images import DATASETS, load_images
from networks import NETWORKS
from pictures import agreement

import tagi_ddp
from tagi_ddp import DDPSequential, DistributedSampler, reduce_metrics
from tagi_ddp.data import ClassTree
from tagi_ddp.optim import SyncSchedule

TREE = ClassTree(10)
SIGMA_V = 1.0  # standard deviation of the observations, which are -1 and 1


def train(model, data, options, scheduled):
    """Return the seconds that training took, and the ranks' agreement by step and layer."""
    targets, nodes = TREE.decisions(data.y_train)
    sampler = DistributedSampler(data.x_train)
    agreements, start = [], time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        batches, wrong = sampler.batches(options.batch_size), 0
        if scheduled:
            model.begin_epoch(len(batches))
        for share in batches:  # this rank's part of each batch
            x = data.x_train[share]
            mean, variance = model.learn(x, targets[share], SIGMA_V**2, nodes[share])
            if options.plot and model.reduction == "precision":
                agreements.append(list(model.get_merge_agreement().values()))
            wrong += np.sum(TREE.probabilities(mean, variance).argmax(1) != data.y_train[share])
        if scheduled:
            model.end_epoch(wrong / max(1, sum(map(len, batches))))
    if model.reduction == "precision":
        model.merge()  # the steps since the last merge
    return time.perf_counter() - start, agreements


def test(model, data):
    model.eval()
    shares = DistributedSampler(data.x_test, shuffle=False).batches(500)
    found = [TREE.probabilities(*model(data.x_test[i])).argmax(1) for i in shares]
    wrong = [labels != data.y_test[i] for labels, i in zip(found, shares, strict=True)]
    return reduce_metrics(model.communicator, sum(map(np.sum, wrong)), sum(map(len, shares)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="of all ranks together")
    parser.add_argument("--node-size", type=int, help="ranks of a node; default: those of a host")
    parser.add_argument("--plot", help="where a PNG file of the ranks' agreement goes")
    options = parser.parse_args()
    merging = {"reduction": "precision", "node_size": options.node_size}
    schedule = SyncSchedule(options.epochs, warmup_epochs=1, cooldown_epochs=1)
    ways = {
        "sum": {"reduction": "sum"},
        "precision": {**merging},
        "precision, every 8 steps": {**merging, "sync_every": 8},
        "precision, by a schedule": {**merging, "sync_every": schedule},
    }
    data = load_images(options.data)
    with tagi_ddp.init() as comm:
        for name, way in ways.items():
            pytagi.manual_seed(0)
            net = NETWORKS["mlp"](data.side, TREE.outputs)
            with DDPSequential(net, communicator=comm, **way) as model:
                seconds, agreements = train(model, data, options, "schedule" in name)
                error, replicas = test(model, data), model.check_replicas()
            if comm.rank == 0:
                print(f"{name}: test error {error:.2%}, {seconds:.1f} s, replicas {replicas[:8]}")
                if options.plot and name == "precision":
                    agreement(options.plot, agreements)


if __name__ == "__main__":
    main()
