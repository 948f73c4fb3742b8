"""Train a graph and attention network on images whose pixels are split over the processes.

python examples/sharding.py
tagi-ddp run -n 2 examples/sharding.py

A process has all parameters, but computes and remembers its own part of the pixels only, in
attention its part of the heads. The losses are those of one process up to the rounding of sums.
All is in float64, so that no mistake could hide in that.
"""

import torch
from images import load_images
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tagi_ddp
from tagi_ddp import sharding

SIDE, PIXELS, CLASSES = 8, 64, 10
CHANNELS, HEADS = 24, 4
BATCH, STEPS = 64, 30


class Network(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, pixels = group, torch.arange(PIXELS)
        self.lengths = sharding.get_shape_shards(pixels, 0, group)  # [[32], [32]] on two ranks
        places = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).double()
        edges = (torch.cdist(places, places) < 1.5).nonzero().T  # from row 0 to row 1
        edges, _, shapes, _ = sharding.sort_edges_1hop_sharding(PIXELS, None, edges, group)
        self.sources, targets = sharding.shard_tensor(edges, 1, shapes, group)
        self.targets = targets - self.own(pixels, 0)[0]  # counted from the first own pixel
        self.grey = nn.Linear(1, CHANNELS)
        self.send, self.receive = nn.Linear(CHANNELS, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.split, self.join = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.votes = nn.Parameter(torch.randn(PIXELS, CHANNELS, CLASSES) / PIXELS)

    def own(self, x, dim):
        """Return this rank's part; elsewhere its gradient is zero."""
        shapes = sharding.get_shape_shards(x, dim, self.group)
        return sharding.shard_tensor(x, dim, shapes, self.group, gather_in_backward=False)

    def forward(self, images):  # (batch, pixels), from here on own pixels only
        x = self.grey(self.own(images, 1)[..., None])
        x = self.attend(self.listen(x))  # (batch, own pixels, channels)
        votes = torch.einsum("bpc,pcn->bn", x, self.own(self.votes, 0))
        return sharding.reduce_tensor(votes, self.group)

    def listen(self, x):
        """Add messages of the pixels around; a rank has the edges that end in its own pixels."""
        shapes = [[len(x), length, CHANNELS] for (length,) in self.lengths]
        sent = sharding.sync_tensor(self.send(x), 1, shapes, self.group)  # by all pixels
        messages = gelu(sent[:, self.sources] + self.receive(x)[:, self.targets])
        return x.index_add(1, self.targets, messages, alpha=1 / 9)

    def attend(self, x):
        """Add what attention takes from all pixels; a rank computes it for its own heads."""
        parts = self.split(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = sharding.shard_heads(parts, self.lengths, self.group)
        seen = scaled_dot_product_attention(query, key, value)  # (batch, own heads, pixels, ...)
        seen = sharding.shard_sequence(seen, self.lengths, self.group)
        return x + self.join(seen.transpose(1, 2).flatten(2))


def main():
    torch.manual_seed(0)  # the same parameters and batches on all ranks
    torch.set_default_dtype(torch.float64)
    data, kept = load_images("digits"), {}  # bytes, by address, of what backward needs
    images, labels = torch.tensor(data.x_train).double(), torch.tensor(data.y_train).long()

    def keep(x):
        kept[x.data_ptr()] = x.nbytes
        return x

    with tagi_ddp.init() as group:
        network = Network(group)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
        for step in range(STEPS + 1):
            batch = torch.randint(len(images), (BATCH,))
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                loss = cross_entropy(network(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            # Each rank has the share that its pixels and heads have in the gradient.
            gradients = [parameter.grad for parameter in network.parameters()]
            group.all_reduce(bucket := parameters_to_vector(gradients))
            vector_to_parameters(bucket, gradients)
            optimizer.step()
            if group.rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {loss:.12f}, {sum(kept.values()) / 1e6:.1f} MB kept")
            kept.clear()


if __name__ == "__main__":
    main()
