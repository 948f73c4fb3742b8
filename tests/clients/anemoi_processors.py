"""One rank of test_anemoi.py: processors of anemoi-models whose sharding is ours.

Prints, for each, the largest difference of its output and gradients from those of one process.
"""

import importlib
from datetime import timedelta

import torch
import torch.distributed as dist
from anemoi.models.layers import processor
from anemoi.utils.config import DotDict
from torch import nn

from tagi_ddp import sharding

NODES, EDGES, CHANNELS, EDGE_CHANNELS, HEADS = 13, 60, 8, 4, 4
SETTINGS = {"num_layers": 2, "num_chunks": 1, "num_channels": CHANNELS, "layer_kernels": DotDict()}
HIDDEN = {"mlp_hidden_ratio": 2, "num_heads": HEADS}
PROCESSORS = {
    "GNNProcessor": {"mlp_extra_layers": 0, "edge_dim": EDGE_CHANNELS},
    "GraphTransformerProcessor": {
        **HIDDEN,
        "edge_dim": EDGE_CHANNELS,
        "graph_attention_backend": "pyg",
    },
    "TransformerProcessor": {
        **HIDDEN,
        "attention_implementation": "scaled_dot_product_attention",
    },
}
# What newer versions call by another name, or with one argument more.
NEWER = {
    "get_shard_shapes": sharding.get_shape_shards,
    "shard_sequence": lambda input_, shapes, num_heads, mgroup: sharding.shard_sequence(
        input_, shapes, mgroup
    ),
}
# They return edges in another order than the documented functions of the same names.
THEIR_OWN = {"get_k_hop_edges", "sort_edges_1hop_chunks", "sort_edges_1hop_sharding"}


def replace_functions() -> set[str]:
    """Put our functions wherever anemoi-models uses its own; return the names replaced."""
    ours = {name: getattr(sharding, name) for name in set(sharding.__all__) - THEIR_OWN}
    ours |= NEWER
    replaced: set[str] = set()
    for part in ("distributed.graph", "layers.block", "layers.processor"):
        module = importlib.import_module(f"anemoi.models.{part}")
        for name in ours.keys() & vars(module).keys():
            setattr(module, name, ours[name])
            replaced.add(name)
    return replaced


def run(name: str, group: dist.ProcessGroup | None) -> dict[str, torch.Tensor]:
    """Return the whole output and all gradients of a seeded processor, split over ``group``."""
    torch.manual_seed(7)
    net: nn.Module = getattr(processor, name)(**SETTINGS, **PROCESSORS[name])
    x = torch.randn(NODES, CHANNELS, requires_grad=True)
    edges = torch.randn(EDGES, EDGE_CHANNELS, requires_grad=True)
    index = torch.randint(NODES, (2, EDGES))
    weights = torch.randn(NODES, CHANNELS)
    shapes = sharding.get_shape_shards(x, 0, group)
    part = sharding.shard_tensor(x, 0, shapes, group)
    arguments = {} if name == "TransformerProcessor" else {"edge_attr": edges, "edge_index": index}
    out = net(part, 1, shapes, model_comm_group=group, **arguments)
    whole = sharding.gather_tensor(out, 0, shapes, group)
    (whole * weights).sum().backward()
    gradients = {key: param.grad for key, param in net.named_parameters()}
    found = {"output": whole.detach(), "input's": x.grad, **gradients}
    return {key: value for key, value in found.items() if value is not None}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    alone = {name: run(name, None) for name in PROCESSORS}  # by anemoi-models' own functions
    replaced = replace_functions()
    needed = {"shard_tensor", "sync_tensor", "shard_heads", "shard_sequence", "get_shard_shapes"}
    assert needed <= replaced, needed - replaced
    for name, expected in alone.items():
        split = run(name, group)
        assert split.keys() == expected.keys()
        largest = 0.0
        for key, value in split.items():
            if key not in ("output", "input's"):  # a rank's part of a sum
                dist.all_reduce(value)
            largest = max(largest, (value - expected[key]).abs().max().item())
        print(f"{name} {largest:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
