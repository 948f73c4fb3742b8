"""Edges around nodes, and all edges sorted by the chunk, or the rank, of the node they end in.

``edge_index`` holds E edges, in one of three forms:

- a tensor, [2, E] of int32 or int64: row 0 has the edges' sources, row 1 their destinations;
- a sparse COO tensor whose ``indices()`` are that tensor: the matrix [sources, destinations]. It
  may be uncoalesced: edges are in the order in which it stores them;
- a sparse CSR tensor of that matrix: edges are in its order, that of their sources.

``edge_attr`` has one row an edge, [E, ...], in the same order; None: edges have no attributes.
Results have the form of the input and memory of their own, and values of sparse tensors stay with
their edges. Gradients flow into ``edge_attr``. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tagi_ddp.checks import integer
from tagi_ddp.communicators.buffers import equal_counts
from tagi_ddp.sharding.groups import Group, rank_and_size
from tagi_ddp.sharding.utils import get_memory_format


def get_k_hop_edges(
    nodes: Tensor | Sequence[int] | Sequence[bool],
    edge_attr: Tensor | None,
    edge_index: Tensor,
    num_hops: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Return the edges over which ``nodes`` are reached in at most ``num_hops`` hops.

    The first hop takes the edges that end in one of ``nodes``. Each next hop takes those that end
    in a source of the previous hop's edges. Edges stay in order, nodes keep their numbers.

    Args:
        nodes: numbers of nodes, in any order, also repeated or none; or a mask of all nodes.
        edge_attr: [E, ...] or None.
        edge_index: E edges, see the module.
        num_hops: 0 takes no edges.

    Returns:
        ``(edge_index, edge_attr)`` of these edges. (anemoi-models documents this order too, but
        returns the other one.)

    Raises:
        TypeError, ValueError, IndexError: naming the argument and what is wrong with it.
    """
    num_hops = integer("num_hops", num_hops, 0)
    edges = _edges(edge_index, edge_attr)
    sources, destinations = edges
    size = max(_check_nodes("sources", sources), _check_nodes("destinations", destinations))
    reached = torch.zeros(size, dtype=torch.bool, device=edges.device)
    ids = _ids(nodes, destinations)
    reached[ids[ids < size]] = True
    chosen = torch.zeros_like(destinations, dtype=torch.bool)
    for _ in range(num_hops):
        found = reached.index_select(0, destinations)
        if torch.equal(found, chosen):  # Further hops find no more.
            break
        chosen = found
        reached[sources[chosen]] = True
    order = chosen.nonzero().squeeze(1)
    return _take(edge_index, edges, order), _take_rows(edge_attr, order)


def sort_edges_1hop_chunks(
    num_nodes: int | tuple[int, int],
    edge_attr: Tensor | None,
    edge_index: Tensor,
    num_chunks: int,
) -> tuple[list[Tensor] | list[None], list[Tensor]]:
    """Return, for each chunk of nodes, the edges that end in it, in their order.

    Nodes are split as ``torch.arange(n).tensor_split(num_chunks)`` does. Time hardly depends on the
    number of chunks.

    Args:
        num_nodes: number of nodes; of a bipartite graph (sources, destinations). Nodes without
            edges count.
        edge_attr: [E, ...] or None.
        edge_index: E edges, see the module.
        num_chunks: the number of chunks; those beyond the number of nodes are empty.

    Returns:
        ``num_chunks`` chunks of ``edge_attr``, views of one tensor (None for each without
        attributes), and as many of ``edge_index``.

    Raises:
        TypeError, ValueError, IndexError: naming the argument and what is wrong with it.
    """
    num_chunks = integer("num_chunks", num_chunks, 1)
    edges = _edges(edge_index, edge_attr)
    order, counts = _sort(num_nodes, edges, num_chunks)
    index_chunks = [_take(edge_index, edges, part) for part in torch.split(order, counts)]
    attr = _take_rows(edge_attr, order)
    return ([None] * num_chunks if attr is None else list(torch.split(attr, counts))), index_chunks


def sort_edges_1hop_sharding(
    num_nodes: int | tuple[int, int],
    edge_attr: Tensor | None,
    edge_index: Tensor,
    mgroup: Group = None,
) -> tuple[Tensor, Tensor | None, list[list[int]], list[list[int]]]:
    """Return the edges sorted by rank: the chunks of `sort_edges_1hop_chunks`, concatenated.

    Every rank passes all edges, and computes this for itself.

    Args:
        num_nodes: number of nodes; of a bipartite graph (sources, destinations).
        edge_attr: [E, ...] or None.
        edge_index: E edges, see the module.
        mgroup: one chunk for each of its ranks; None: no sorting.

    Returns:
        ``(edge_index, edge_attr, index_shapes, attr_shapes)``. The shapes have an entry per rank,
        [2, E of the rank] and [E of the rank, ...]: what `shard_tensor` takes for dimensions 1 and
        0. ``attr_shapes`` is empty without attributes. Without a group the inputs are returned,
        and two empty lists.

        A CSR matrix cannot have this order, and coalescing a COO tensor changes it. For a CSR or
        COO tensor the result is an uncoalesced COO tensor, whose ``_indices()`` can be sharded.

    Raises:
        TypeError, ValueError, IndexError: naming the argument and what is wrong with it.
    """
    if mgroup is None:
        return edge_index, edge_attr, [], []
    edges = _edges(edge_index, edge_attr)
    order, counts = _sort(num_nodes, edges, rank_and_size(mgroup)[1])
    index = _take(edge_index, edges, order, in_order=False)
    index_shapes = [[2, count] for count in counts]
    attr = _take_rows(edge_attr, order)
    attr_shapes = [] if attr is None else [[count, *attr.shape[1:]] for count in counts]
    return index, attr, index_shapes, attr_shapes


def _edges(edge_index: Tensor, edge_attr: Tensor | None) -> Tensor:
    """Return ``edge_index`` as a tensor [2, E], checked together with the attributes."""
    if not isinstance(edge_index, Tensor):
        raise TypeError(f"edge_index must be a torch.Tensor, got a {type(edge_index).__name__}")
    if edge_index.layout == torch.sparse_coo:
        edges = edge_index._indices()
    elif edge_index.layout == torch.sparse_csr and edge_index.crow_indices().dim() == 1:
        columns = edge_index.col_indices()
        rows = torch.arange(edge_index.shape[0], dtype=columns.dtype, device=columns.device)
        edges = torch.stack([rows.repeat_interleave(edge_index.crow_indices().diff()), columns])
    elif edge_index.layout == torch.strided:
        edges = edge_index
    else:
        got = f"{edge_index.layout}, {list(edge_index.shape)}"
        raise TypeError(f"edge_index must be [2, E], or one COO or CSR matrix, got {got}")
    if edges.dim() != 2 or edges.shape[0] != 2:
        raise ValueError(f"edge_index must be [2, E], got {list(edges.shape)}")
    if edges.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"edge_index must be int32 or int64, got {edges.dtype}")
    if edge_attr is not None and not isinstance(edge_attr, Tensor):
        got = type(edge_attr).__name__
        raise TypeError(f"edge_attr must be a torch.Tensor or None, got a {got}")
    if edge_attr is not None and list(edge_attr.shape[:1]) != [edges.shape[1]]:
        raise ValueError(
            f"edge_attr must have a row for each of {edges.shape[1]} edges, "
            f"got {list(edge_attr.shape)}"
        )
    return edges


def _take(edge_index: Tensor, edges: Tensor, order: Tensor, in_order: bool = True) -> Tensor:
    """Return the edges ``order``, increasing or not, in the form of ``edge_index``."""
    chosen = edges.new_empty(2, len(order))
    for row, taken in zip(edges, chosen, strict=True):  # Twice as fast as along dimension 1.
        torch.index_select(row, 0, order, out=taken)
    layout, shape = edge_index.layout, edge_index.shape
    if layout == torch.strided:
        return chosen
    coo = layout == torch.sparse_coo
    values = edge_index._values() if coo else edge_index.values().detach()
    values = values.index_select(0, order)
    if coo or not in_order:
        coalesced = coo and in_order and edge_index.is_coalesced()
        return torch.sparse_coo_tensor(
            chosen, values, shape, check_invariants=False, is_coalesced=coalesced
        )
    rows = torch.zeros(shape[0] + 1, dtype=chosen.dtype, device=chosen.device)
    torch.cumsum(torch.bincount(chosen[0], minlength=shape[0]), 0, out=rows[1:])
    return torch.sparse_csr_tensor(rows, chosen[1], values, shape, check_invariants=False)


def _take_rows(edge_attr: Tensor | None, order: Tensor) -> Tensor | None:
    """Return the attributes of the edges ``order``, in their memory format."""
    if edge_attr is None:
        return None
    rows = edge_attr.index_select(0, order)
    return rows.contiguous(memory_format=get_memory_format(edge_attr))


def _sort(
    num_nodes: int | tuple[int, int], edges: Tensor, num_chunks: int
) -> tuple[Tensor, list[int]]:
    """Return a stable order of the edges by chunk of destinations, and the chunks' sizes."""
    sources, destinations = edges
    if isinstance(num_nodes, (tuple, list)):
        if len(num_nodes) != 2:
            raise ValueError(f"num_nodes must be (sources, destinations), got {num_nodes!r}")
        _check_nodes("sources", sources, integer("num_nodes[0]", num_nodes[0], 0))
        nodes = integer("num_nodes[1]", num_nodes[1], 0)
    else:
        nodes = integer("num_nodes", num_nodes, 0)
    _check_nodes("destinations", destinations, nodes)
    width = torch.uint8 if num_chunks <= 256 else torch.int32  # Narrow keys are sorted faster.
    sizes = torch.tensor(equal_counts(nodes, num_chunks), device=edges.device)
    numbers = torch.arange(num_chunks, dtype=width, device=edges.device)
    # Looking up the chunk of each node takes a tenth of the time of a search.
    chunks = numbers.repeat_interleave(sizes, output_size=nodes).index_select(0, destinations)
    counts = torch.bincount(chunks, minlength=num_chunks).tolist()
    return torch.sort(chunks, stable=True).indices, counts


def _check_nodes(name: str, ids: Tensor, count: int | None = None) -> int:
    """Raise IndexError unless all ``ids`` are from 0 to ``count`` - 1; return the highest + 1."""
    if not ids.numel():
        return 0
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0:
        raise IndexError(f"edge_index: {name} must not be negative, got {low}")
    if count is not None and high >= count:
        raise IndexError(f"edge_index: {name} must be below {count} (num_nodes), got {high}")
    return high + 1


def _ids(nodes: Tensor | Sequence[int] | Sequence[bool], destinations: Tensor) -> Tensor:
    """Return the numbers of ``nodes``, which are numbers or a mask."""
    nodes = torch.as_tensor(nodes, device=destinations.device)
    if nodes.dtype == torch.bool:
        needed = _check_nodes("destinations", destinations)
        if nodes.dim() != 1 or len(nodes) < needed:
            raise ValueError(
                f"nodes as a mask must be [number of nodes], at least {needed}, "
                f"got {list(nodes.shape)}"
            )
        return nodes.nonzero().squeeze(1)
    if nodes.numel() and (nodes.is_floating_point() or nodes.is_complex()):
        raise TypeError(f"nodes must be integers or a mask, got {nodes.dtype}")
    ids = nodes.reshape(-1).long()
    if ids.numel() and int(ids.min()) < 0:
        raise IndexError(f"nodes must not be negative, got {int(ids.min())}")
    return ids
