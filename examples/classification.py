"""Classify images on several processes; the result is that of one process.

tagi-ddp run -n 2 examples/classification.py --model cnn
mpirun -n 2 python examples/classification.py --data fashion-mnist --batch-size 256
torchrun --nproc-per-node 2 examples/classification.py
python examples/classification.py
"""

import argparse
import time

import numpy as np
import pytagi
from images import DATASETS, load_images
from networks import NETWORKS

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler, progress, reduce_metrics
from tagi_ddp.data import ClassTree, share_of

TREE = ClassTree(10)


def train(options):
    """Train on this rank's shares; return what a comparison of runs needs."""
    data = load_images(
        options.data, options.data_dir, download=options.download, limit=options.limit
    )
    pytagi.manual_seed(0)
    net = NETWORKS[options.model](data.side, TREE.outputs)
    if options.threads:
        net.set_threads(options.threads)
    # average=False: the sum of the ranks' deltas, which is the delta of the whole batch.
    config = DDPConfig.from_env()
    with DDPSequential(net, config, average=False, compute=options.compute) as model:
        seconds = fit(model, data.x_train, data.y_train, options)
        error = test(model, data.x_test, data.y_test)
        replicas = model.check_replicas()
        if model.communicator.rank == 0:
            print(f"test error {error:.2%}; the replicas are equal: {replicas[:16]}", flush=True)
        parameters = np.concatenate([*map(np.concatenate, model.state_dict().values())])
    return {"error": error, "seconds": seconds, "replicas": replicas, "parameters": parameters}


def fit(model, x, y, options):
    targets, nodes = TREE.decisions(y)
    sampler = DistributedSampler(x)
    seconds = 0.0
    for epoch in (bar := progress(range(options.epochs), unit="epoch")):
        sampler.set_epoch(epoch)
        start, wrong, seen = time.perf_counter(), 0, 0
        for share in sampler.batches(options.batch_size):  # this rank's part of each batch
            mean, variance = model.learn(x[share], targets[share], options.sigma_v**2, nodes[share])
            wrong += np.sum(labels(mean, variance) != y[share])
            seen += len(share)
        seconds += time.perf_counter() - start
        error = reduce_metrics(model.communicator, wrong, seen)
        bar.set_postfix_str(f"training error {error:.2%}")
    return seconds


def labels(mean, variance):
    return TREE.probabilities(mean, variance).argmax(axis=1)


def test(model, x, y):
    share = share_of(len(x), model.communicator.rank, model.communicator.size)
    wrong = labels(*model.predict(x[share])) != y[share]
    return reduce_metrics(model.communicator, np.sum(wrong), len(wrong))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=DATASETS, default="digits")
    parser.add_argument("--data-dir", help="folder of Fashion-MNIST's files, or MNIST's")
    parser.add_argument("--download", action="store_true", help="fetch Fashion-MNIST if needed")
    parser.add_argument("--model", choices=NETWORKS, default="mlp")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="of all ranks together")
    parser.add_argument("--sigma-v", type=float, default=0.5, help="deviation of the labels' noise")
    parser.add_argument("--limit", type=int, help="take only so many images")
    parser.add_argument("--threads", type=int, help="of each process; default: its share of cores")
    parser.add_argument("--compute", choices=("auto", "engine", "torch"), default="auto")
    return parser


if __name__ == "__main__":
    train(arguments().parse_args())
