"""Train on real images while processes are killed, and plot what happened.

tagi-ddp run -n 4 --max-restarts 4 examples/elastic.py --kills 4

At some steps one of the processes kills itself. The others make the step again with its share of
the batch, a new process takes its place and the posterior of the others, and training ends as if
nothing had happened.
"""

import argparse
import csv
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytagi
from images import load_images
from networks import NETWORKS
from pictures import BLUE, VERMILION, panels, plain_ticks, save

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler
from tagi_ddp.data import ClassTree, class_scores

TREE, SIGMA_V, BATCH = ClassTree(10), 1.0, 32


def test_error(model, data):
    return class_scores(TREE.probabilities(*model(data.x_test)), data.y_test).error


def train(model, data, options, record):
    targets, nodes = TREE.decisions(data.y_train)
    sampler = DistributedSampler(data.x_train)
    steps = options.epochs * -(-len(data.x_train) // BATCH)
    kills = np.linspace(steps / 10, steps / 2, options.kills).astype(int)
    for step, share in model.steps(sampler, BATCH, options.epochs):
        again = bool(model.changes) and model.changes[-1].step == step
        if step in kills and not again:
            comm = model.communicator
            if comm.size > 1 and comm.rank == step % comm.size:
                os.kill(os.getpid(), signal.SIGKILL)
        model.learn(data.x_train[share], targets[share], SIGMA_V**2, nodes[share])
        time.sleep(options.pause)
        error = test_error(model, data) if step % 20 == 0 else np.nan
        record.writerow([time.time(), step, model.communicator.size, error])


def plot(files, path):
    figure, (lives, errors) = panels(2, (8, 5), sharex=True)
    records = sorted(
        (np.loadtxt(file, delimiter=",", ndmin=2) for file in files), key=lambda r: r[0, 0]
    )
    begin, end = records[0][0, 0], max(r[-1, 0] for r in records)
    for number, (seconds, _, _, _) in enumerate(r.T for r in records):
        last = seconds[-1] - begin
        lives.plot([seconds[0] - begin, last], [number, number], color=BLUE, linewidth=6)
        if seconds[-1] < end - 0.5:
            lives.plot(last, number, "X", color=VERMILION, markersize=11)
    lives.plot([], [], "X", color=VERMILION, markersize=11, label="killed")
    lives.plot([], [], color=BLUE, linewidth=6, label="trains")
    lives.legend(loc="upper left")
    lives.set(ylabel="process", yticks=range(len(records)), title="Which processes train")
    seconds, _, _, error = np.concatenate(records).T
    errors.plot(seconds - begin, 100 * error, ".", color=BLUE)
    errors.set(xlabel="time in seconds", ylabel="test error in %", yscale="log", ylim=(None, 100))
    errors.set_title("What they have learned")
    plain_ticks(errors.yaxis, (5, 10, 20, 50, 100))
    save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.01, help="seconds after each step")
    parser.add_argument("--folder", default="elastic", help="for a record of each process, and PNG")
    options = parser.parse_args()
    folder, job = Path(options.folder), os.environ["TAGI_DDP_JOB"]
    folder.mkdir(exist_ok=True)
    data = load_images("digits")
    pytagi.manual_seed(0)
    net = NETWORKS["mlp"](data.side, TREE.outputs)
    with DDPSequential(net, DDPConfig.from_env(), average=False, elastic=True) as model:
        with open(folder / f"{job}.{os.getpid()}.csv", "w", buffering=1) as file:
            train(model, data, options, csv.writer(file))
        replicas, error = model.check_replicas(), test_error(model, data)
        if model.communicator.rank == 0:
            print(f"{len(model.changes)} changes; test error {error:.2%}; replicas {replicas[:8]}")
            plot(folder.glob(f"{job}.*.csv"), folder / "elastic.png")


if __name__ == "__main__":
    main()
