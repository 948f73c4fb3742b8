"""Edges around nodes and edges by chunk, against their definitions on lists of random edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup

from tagi_ddp import init
from tagi_ddp.sharding.khop_edges import (
    get_k_hop_edges,
    sort_edges_1hop_chunks,
    sort_edges_1hop_sharding,
)

# torch says once in a process that CSR tensors are in beta state.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")

Edge = tuple[int, int]
Graph = tuple[int, int, list[Edge]]  # sources, destinations, edges
# No deadline: on a busy machine any call can take long.
examples = settings(max_examples=60, deadline=None)
FORMS = ["int64", "int32", "strided", "coo", "coalesced", "csr", "csr32"]


@st.composite
def graphs(draw: st.DrawFn, bipartite: bool = True) -> Graph:
    """Few nodes and up to 40 edges, so that there are isolated nodes and repeated edges."""
    sources = draw(st.integers(0, 12))
    destinations = draw(st.integers(0, 12)) if bipartite else sources
    if not sources or not destinations:
        return sources, destinations, []
    edge = st.tuples(st.integers(0, sources - 1), st.integers(0, destinations - 1))
    return sources, destinations, draw(st.lists(edge, max_size=40))


def tensor(edges: list[Edge]) -> Tensor:
    return torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).t().contiguous()


def make(form: str, graph: Graph) -> tuple[Tensor, list[Edge]]:
    """Return the graph's edges in a form, and the order that they have there."""
    sources, destinations, edges = graph
    index = tensor(edges)
    if form in ("int64", "int32"):
        return index.to(getattr(torch, form)), edges
    if form == "strided":
        return index.t().contiguous().t(), edges
    if form != "coo":  # these merge edges that are repeated
        edges = sorted(set(edges))
    size = (sources, destinations)
    weights = torch.arange(len(edges)) + 0.5
    sparse = torch.sparse_coo_tensor(
        tensor(edges), weights, size, is_coalesced=form != "coo", check_invariants=True
    )
    if not form.startswith("csr"):
        return sparse, edges
    csr = sparse.to_sparse_csr()
    width = torch.int32 if form == "csr32" else torch.int64
    rows, columns = csr.crow_indices().tolist(), csr.col_indices().tolist()
    return torch.sparse_csr_tensor(
        torch.tensor(rows, dtype=width),
        torch.tensor(columns, dtype=width),
        weights,
        size,
        check_invariants=True,
    ), edges


def attributes(edges: list[Edge], *shape: int) -> Tensor:
    """Return what tells each edge from all others."""
    numbers = torch.arange(len(edges), dtype=torch.float64)
    return numbers.reshape(-1, *[1] * len(shape)).expand(-1, *shape).clone()


def read(form: str, index: Tensor, order: list[int], graph: Graph) -> list[Edge]:
    """Return the edges of a result; check its form, and that weights came with their edges."""
    if form in ("int64", "int32", "strided"):
        assert index.dtype == (torch.int32 if form == "int32" else torch.int64)
        assert index.is_contiguous()
        assert index.shape[0] == 2
        rows, columns = index.tolist()
        return list(zip(rows, columns, strict=True))
    assert index.shape == graph[:2]
    if form.startswith("csr"):
        assert index.layout == torch.sparse_csr
        assert index.col_indices().dtype == (torch.int32 if form == "csr32" else torch.int64)
        torch.sparse_csr_tensor(
            index.crow_indices(),
            index.col_indices(),
            index.values(),
            index.shape,
            check_invariants=True,
        )
        assert index.values().tolist() == [number + 0.5 for number in order]
        index = index.to_sparse_coo()
    else:
        assert index.layout == torch.sparse_coo
        assert index.is_coalesced() == (form == "coalesced")
        assert index._values().tolist() == [number + 0.5 for number in order]
    rows, columns = index._indices().tolist()
    return list(zip(rows, columns, strict=True))


def hop_order(edges: list[Edge], nodes: set[int], hops: int) -> list[int]:
    """The definition of `get_k_hop_edges`: numbers of edges."""
    taken: set[int] = set()
    for _ in range(hops):
        now = {i for i, (_, destination) in enumerate(edges) if destination in nodes}
        taken |= now
        nodes = {edges[i][0] for i in now}
    return sorted(taken)


def chunk_orders(edges: list[Edge], destinations: int, chunks: int) -> list[list[int]]:
    """The definition of `sort_edges_1hop_chunks`: numbers of edges, by chunk."""
    parts = [set(part.tolist()) for part in np.array_split(np.arange(destinations), chunks)]
    return [[i for i, edge in enumerate(edges) if edge[1] in part] for part in parts]


def as_list(nodes: list[int], size: int) -> list[int]:
    return nodes


def as_tensor(nodes: list[int], size: int) -> Tensor:
    return torch.tensor(nodes, dtype=torch.int64)


def as_mask(nodes: list[int], size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[nodes] = True
    return mask


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data(), graph=graphs(), hops=st.integers(0, 6))
@examples
def test_hops(form: str, data: st.DataObject, graph: Graph, hops: int) -> None:
    index, edges = make(form, graph)
    given_as = data.draw(st.sampled_from([as_list, as_tensor, as_mask]))
    size = max(graph[:2]) + 2
    nodes = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
    order = hop_order(edges, set(nodes), hops)
    found, attr = get_k_hop_edges(given_as(nodes, size), attributes(edges, 3), index, hops)
    assert read(form, found, order, graph) == [edges[i] for i in order]
    assert torch.equal(attr, attributes(edges, 3)[order])


@pytest.mark.parametrize("form", FORMS)
@given(graph=graphs(), chunks=st.integers(1, 15), shape=st.lists(st.integers(0, 2), max_size=2))
@examples
def test_chunks(form: str, graph: Graph, chunks: int, shape: list[int]) -> None:
    index, edges = make(form, graph)
    attr = attributes(edges, *shape)
    attrs, indices = sort_edges_1hop_chunks(graph[:2], attr, index, chunks)
    orders = chunk_orders(edges, graph[1], chunks)
    assert len(attrs) == len(indices) == chunks
    for order, found, part in zip(orders, indices, attrs, strict=True):
        assert read(form, found, order, graph) == [edges[i] for i in order]
        assert torch.equal(part, attr[order])
        assert part.is_contiguous()


@given(graph=graphs(bipartite=False), chunks=st.integers(1, 15))
@examples
def test_chunks_of_one_set_of_nodes(graph: Graph, chunks: int) -> None:
    _, nodes, edges = graph
    index = tensor(edges)
    expected = [tensor([edges[i] for i in o]) for o in chunk_orders(edges, nodes, chunks)]
    for count in (nodes, np.int64(nodes), (nodes, nodes), (np.int32(nodes), np.int32(nodes))):
        attrs, found = sort_edges_1hop_chunks(count, None, index, np.int64(chunks))
        assert attrs == [None] * chunks
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("chunks", [255, 256, 257, 1000])
def test_many_chunks(chunks: int) -> None:
    """Around 256, above which chunks are no longer numbered by one byte."""
    nodes = chunks + 3
    destinations = torch.cat([torch.arange(nodes - 1, -1, -40), torch.arange(nodes)])
    index = torch.stack([torch.arange(len(destinations)), destinations])
    _, found = sort_edges_1hop_chunks((len(destinations), nodes), None, index, chunks)
    starts = [part[0] for part in np.array_split(np.arange(nodes), chunks)] + [nodes]
    order = np.argsort(np.searchsorted(starts, destinations.numpy(), "right"), kind="stable")
    assert torch.equal(torch.cat(found, 1), index[:, order])
    for chunk, low, high in zip(found, starts, starts[1:], strict=False):
        assert chunk.shape[1] >= high - low
        assert low <= int(chunk[1].min()) <= int(chunk[1].max()) < high


@pytest.mark.parametrize("form", FORMS)
@given(graph=graphs(), ranks=st.integers(1, 8))
@examples
def test_sharding(form: str, graph: Graph, ranks: int) -> None:
    index, edges = make(form, graph)
    attr = attributes(edges, 2, 1)
    found, found_attr, index_shapes, attr_shapes = sort_edges_1hop_sharding(
        graph[:2], attr, index, ProcessGroup(HashStore(), 0, ranks)
    )
    orders = chunk_orders(edges, graph[1], ranks)
    order = [i for part in orders for i in part]
    # No CSR or coalesced COO tensor has its edges in this order.
    kept = "coo" if form in ("csr", "csr32", "coalesced") else form
    assert read(kept, found, order, graph) == [edges[i] for i in order]
    assert torch.equal(found_attr, attr[order])
    assert index_shapes == [[2, len(part)] for part in orders]
    assert attr_shapes == [[len(part), 2, 1] for part in orders]


def test_sharding_without_attributes() -> None:
    index = tensor([(0, 1), (1, 0)])
    group = ProcessGroup(HashStore(), 0, 2)
    found, attr, index_shapes, attr_shapes = sort_edges_1hop_sharding(2, None, index, group)
    assert found.tolist() == [[1, 0], [0, 1]]
    assert attr is None
    assert index_shapes == [[2, 1], [2, 1]]
    assert attr_shapes == []


def test_sharding_alone() -> None:
    index, attr = tensor([(0, 1), (1, 0)]), torch.ones(2)
    assert sort_edges_1hop_sharding(2, attr, index) == (index, attr, [], [])
    with init(rank=0, world_size=1) as communicator:
        found, found_attr, *shapes = sort_edges_1hop_sharding(2, attr, index, communicator)
    assert shapes == [[[2, 2]], [[2]]]
    index.zero_()
    attr.zero_()
    assert found.tolist() == [[0, 1], [1, 0]]
    assert found_attr.tolist() == [1, 1]


def test_gradients_reach_their_edges() -> None:
    edges = [(0, 3), (1, 0), (2, 1), (3, 3), (0, 2), (2, 0)]
    index = tensor(edges)
    attr = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    group = ProcessGroup(HashStore(), 0, 3)

    def sort(values: Tensor) -> Tensor:
        return torch.cat(sort_edges_1hop_chunks(4, values, index, 3)[0])

    def shard(values: Tensor) -> Tensor:
        return sort_edges_1hop_sharding(4, values, index, group)[1]

    def hop(values: Tensor) -> Tensor:
        return get_k_hop_edges([0], values, index, 2)[1]

    for function in (sort, shard, hop):
        assert torch.autograd.gradcheck(function, attr)
    (gradient,) = torch.autograd.grad(hop(attr).sum(), attr)
    assert gradient[:, 0].tolist() == [0, 1, 1, 0, 1, 1]


def test_memory_format_is_kept() -> None:
    graph = torch.tensor([[0, 1, 2], [2, 1, 0]])
    attr = torch.randn(3, 2, 4, 5).contiguous(memory_format=torch.channels_last)
    group = ProcessGroup(HashStore(), 0, 2)
    for found in (
        *sort_edges_1hop_chunks(3, attr, graph, 2)[0],
        sort_edges_1hop_sharding(3, attr, graph, group)[1],
        get_k_hop_edges([1, 2], attr, graph)[1],
    ):
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_results_share_nothing(form: str) -> None:
    graph: Graph = (3, 3, [(0, 1), (1, 1), (2, 0)])
    index, edges = make(form, graph)
    before, attr = index.clone(), attributes(edges)
    _, (chunk,) = sort_edges_1hop_chunks(3, attr, index, 1)
    hops, _ = get_k_hop_edges([0, 1, 2], attr, index)
    for result in (chunk, hops):
        for part in (result,) if result.layout == torch.strided else parts(result):
            part.zero_()
    assert torch.equal(index.to_dense(), before.to_dense())
    assert torch.equal(attr, attributes(edges))


def parts(sparse: Tensor) -> tuple[Tensor, ...]:
    if sparse.layout == torch.sparse_csr:
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    return sparse._indices(), sparse._values()


INDEX = torch.tensor([[0, 1], [2, 0]])
CHUNKS, HOPS = sort_edges_1hop_chunks, get_k_hop_edges


@pytest.mark.parametrize(
    ("function", "arguments", "error", "text"),
    [
        (CHUNKS, (2, None, INDEX, 1), IndexError, r"destinations must be below 2 .*got 2"),
        (CHUNKS, ((1, 3), None, INDEX, 1), IndexError, r"sources must be below 1 .*got 1"),
        (CHUNKS, (3, None, -INDEX, 1), IndexError, "destinations must not be negative, got -2"),
        (CHUNKS, (3, None, INDEX, 0), ValueError, "num_chunks must be at least 1, got 0"),
        (CHUNKS, (-1, None, INDEX, 1), ValueError, "num_nodes must be at least 0, got -1"),
        (CHUNKS, (1.5, None, INDEX, 1), TypeError, "num_nodes must be an integer"),
        (CHUNKS, ((3, 3, 3), None, INDEX, 1), ValueError, r"\(sources, destinations\)"),
        (CHUNKS, (3, None, INDEX.t()[:1], 1), ValueError, r"\[2, E\], got \[1, 2\]"),
        (CHUNKS, (3, None, INDEX.float(), 1), TypeError, "int32 or int64, got torch.float32"),
        (CHUNKS, (3, None, INDEX.tolist(), 1), TypeError, "torch.Tensor, got a list"),
        (CHUNKS, (3, np.ones(2), INDEX, 1), TypeError, "edge_attr must be .* got a ndarray"),
        (CHUNKS, (3, torch.ones(3), INDEX, 1), ValueError, r"each of 2 edges, got \[3\]"),
        (CHUNKS, (3, torch.ones(()), INDEX, 1), ValueError, r"each of 2 edges, got \[\]"),
        (HOPS, ([-1], None, INDEX), IndexError, "nodes must not be negative, got -1"),
        (HOPS, ([0.5], None, INDEX), TypeError, "integers or a mask, got torch.float32"),
        (HOPS, ([True, False], None, INDEX), ValueError, r"at least 3, got \[2\]"),
        (HOPS, ([0], None, INDEX, -1), ValueError, "num_hops must be at least 0, got -1"),
        (HOPS, ([0], None, INDEX - 1), IndexError, "sources must not be negative, got -1"),
    ],
)
def test_errors_say_which(
    function: Callable, arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        function(*arguments)


def test_other_layouts() -> None:
    square = torch.eye(3)
    with pytest.raises(TypeError, match=r"got torch\.sparse_csc"):
        get_k_hop_edges([0], None, square.to_sparse_csc())
    with pytest.raises(TypeError, match=r"got torch\.sparse_csr, \[2, 3, 3\]"):
        get_k_hop_edges([0], None, torch.stack([square, square]).to_sparse_csr())
    with pytest.raises(ValueError, match=r"\[2, E\], got \[3, 8\]"):
        get_k_hop_edges([0], None, torch.ones(2, 2, 2).to_sparse())


def test_groups_that_are_none() -> None:
    with pytest.raises(TypeError, match="got str"):
        sort_edges_1hop_sharding(3, None, INDEX, "ranks")
    left_out = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(ValueError, match="not in the group"):
        sort_edges_1hop_sharding(3, None, INDEX, left_out)
