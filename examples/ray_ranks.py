"""Train on the ranks of a Ray cluster, actors that find each other as processes of torchrun do.

pip install ray
python examples/ray_ranks.py --ranks 4
"""

import argparse
import os
import secrets
import socket
from collections import Counter

import numpy as np
import pytagi
import ray
from pytagi.nn import Linear, ReLU, Sequential

from tagi_ddp import DDPConfig, DDPSequential, DistributedSampler


@ray.remote(num_cpus=1)
class Rank:
    """A process of the cluster that becomes a rank."""

    def place(self):
        """Return the node, and an address and a port on it that rank 0 could use."""
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def run(self, variables, function, *arguments):
        """Return what ``function`` does with these environment variables."""
        os.environ.update(variables)
        return function(*arguments)


def run_on_ranks(function, ranks, *arguments):
    """Return what ``function`` returns on each of so many actors."""
    actors = [Rank.remote() for _ in range(ranks)]
    places = ray.get([actor.place.remote() for actor in actors])
    on_node, seen = Counter(node for node, _, _ in places), Counter()
    _, address, port = places[0]
    common = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TAGI_DDP_SECRET": secrets.token_hex(32),
        "TAGI_DDP_JOB": secrets.token_hex(8),
    }
    results = []
    for rank, (actor, (node, _, _)) in enumerate(zip(actors, places, strict=True)):
        local = {"LOCAL_RANK": str(seen[node]), "LOCAL_WORLD_SIZE": str(on_node[node])}
        seen[node] += 1
        variables = {"RANK": str(rank), **local, **common}
        results.append(actor.run.remote(variables, function, *arguments))
    return ray.get(results)  # an actor that fails raises here; the other ranks get PeerLost


def train(epochs):
    """Return this rank, what carries the deltas, the last error and the replicas' hash."""
    x = np.random.default_rng(0).uniform(-2, 2, size=(1024, 1)).astype(np.float32)
    y = np.sin(2 * x)
    pytagi.manual_seed(1)
    network = Sequential(Linear(1, 32), ReLU(), Linear(32, 1))
    sampler = DistributedSampler(x)
    with DDPSequential(network, DDPConfig.from_env(), average=False) as model:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for share in sampler.batches(32):
                model.learn(x[share], y[share], 0.1**2)
        mean, _ = model(x)
        error = float(np.sqrt(np.mean((mean - y.ravel()) ** 2)))
        communicator = model.communicator
        return communicator.rank, communicator.backend, error, model.check_replicas()


def main():
    """Print what each rank returns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    ray.init(log_to_driver=False)
    for rank, backend, error, replicas in run_on_ranks(train, options.ranks, options.epochs):
        print(f"rank {rank} ({backend}): error {error:.3f}, replicas {replicas[:8]}")


if __name__ == "__main__":
    main()
