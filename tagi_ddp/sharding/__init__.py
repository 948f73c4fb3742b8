"""Tensors and graphs of one model, split over the ranks of a group."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    raise ImportError("tagi_ddp.sharding needs torch: pip install '.[torch]'")

from tagi_ddp.sharding.graph import (
    gather_tensor,
    reduce_shard_tensor,
    reduce_tensor,
    shard_tensor,
    sync_tensor,
)
from tagi_ddp.sharding.khop_edges import (
    get_k_hop_edges,
    sort_edges_1hop_chunks,
    sort_edges_1hop_sharding,
)
from tagi_ddp.sharding.shapes import change_channels_in_shape, get_shape_shards
from tagi_ddp.sharding.transformer import shard_heads, shard_sequence
from tagi_ddp.sharding.utils import get_memory_format

__all__ = [
    "change_channels_in_shape",
    "gather_tensor",
    "get_k_hop_edges",
    "get_memory_format",
    "get_shape_shards",
    "reduce_shard_tensor",
    "reduce_tensor",
    "shard_heads",
    "shard_sequence",
    "shard_tensor",
    "sort_edges_1hop_chunks",
    "sort_edges_1hop_sharding",
    "sync_tensor",
]
