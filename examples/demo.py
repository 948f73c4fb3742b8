"""Train one network with one process and with two, and compare: time, test error, parameters.

All runs see the same images in the same global batches.
"""

import argparse
import os

import numpy as np
from classification import arguments, train

import tagi_ddp

RUNS = {
    "the engine, 1 process, 1 thread": (1, 1, "engine"),
    "torch, 1 process, 1 thread": (1, 1, "torch"),
    "torch, 1 process, 2 threads": (1, 2, "torch"),
    "torch, 2 processes, 1 thread each": (2, 1, "torch"),
}


def run(title, options, **changes):
    processes, threads, compute = RUNS[title]
    settings = {"threads": threads, "compute": compute, **changes}
    options = argparse.Namespace(**{**vars(options), **settings})
    return tagi_ddp.launch(train, processes, (options,), timeout=900)


def main():
    parser = arguments()
    parser.set_defaults(model="cnn", epochs=40, batch_size=256)  # so long that two ranks win
    options = parser.parse_args()
    engine, one, threaded, two = RUNS

    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, load average of the last minute {os.getloadavg()[0]:.1f}")
    print(f"One batch of {options.batch_size} images")
    first = {"limit": options.batch_size, "epochs": 1}
    alone, shared = (run(title, options, **first)[0]["parameters"] for title in (engine, two))
    difference = np.linalg.norm(shared - alone) / np.linalg.norm(alone)

    results = {}
    for title in RUNS:
        print(f"\n{title}: {options.model}, {options.data}, {options.epochs} epochs")
        results[title] = run(title, options)

    print(f"\n{'':34}training    speed-up    test error")
    seconds = {title: max(rank["seconds"] for rank in ranks) for title, ranks in results.items()}
    for title, ranks in results.items():
        speedup = seconds[engine] / seconds[title]
        print(f"{title:34}{seconds[title]:6.1f} s{speedup:11.1f}{ranks[0]['error']:14.2%}")

    hashes = [rank["replicas"][:16] for rank in results[two]]
    print(f"\n2 processes are {seconds[one] / seconds[two]:.2f} times as fast as 1 with 1 thread,")
    print(f"and {seconds[threaded] / seconds[two]:.2f} times as fast as 1 with 2 threads.")
    print(f"The 2 replicas are equal bit for bit: {' = '.join(hashes)}")
    print(f"After one batch, they and the engine differ by {difference:.0e} of the norm,")
    print("the rounding of sums. Training amplifies it: the test errors may differ by an image or")
    print("a few, as those of one process do when the images within a batch change places.")
    if cores < 2:
        print("There is only one core here: no speed-up can be expected.")


if __name__ == "__main__":
    main()
