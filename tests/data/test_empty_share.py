"""A rank whose share of a batch is empty gets no sample, or all ranks get an error at once."""

from __future__ import annotations

import gc
import random
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tagi_ddp import prepare


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: Any


@dataclass
class Cached:
    """Has data beside its fields."""

    x: Any

    def __post_init__(self) -> None:
        self.cache = self.x.tolist()


@dataclass
class Derived:
    x: Any
    rows: Any = field(init=False)

    def __post_init__(self) -> None:
        self.rows = self.x + 1


class Graph:
    """An object with attributes, such as a batch of graphs."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def keys(self) -> list[str]:
        return ["x"]


def column(xs: list[int]) -> torch.Tensor:
    return torch.tensor(xs)[:, None]


def edges(xs: list[int]) -> torch.Tensor:
    return torch.tensor(xs * 3).reshape(3, -1)[:2].repeat_interleave(2, 1)


# What makes batches, and the batch of no samples as `plain` shows it.
KNOWN: dict[str, tuple[Callable[[list[int]], Any], Any]] = {
    "tensor": (column, (0, 1)),
    "UserDict": (lambda xs: UserDict(x=column(xs)), {"x": (0, 1)}),
    "OrderedDict": (lambda xs: OrderedDict(x=column(xs)), {"x": (0, 1)}),
    "defaultdict": (lambda xs: defaultdict(list, x=column(xs)), {"x": (0, 1)}),
    "None": (lambda xs: {"x": column(xs), "mask": None}, {"x": (0, 1), "mask": None}),
    "named tuple": (lambda xs: Pair(column(xs), xs), [(0, 1), []]),
    "frozen dataclass": (lambda xs: Frozen(column(xs)), {"x": (0, 1)}),
    "derived field": (lambda xs: Derived(column(xs)), {"x": (0, 1), "rows": (0, 1)}),
    "samples": (lambda xs: [column([x]) for x in xs], []),
    "lists in lists": (lambda xs: [[x, [x]] for x in xs], []),
    "fields": (lambda xs: [column(xs), [xs, (column(xs),)]], [(0, 1), [[], [(0, 1)]]]),
    "deque": (lambda xs: deque(xs), []),
    "texts": (
        lambda xs: {"x": column(xs), "names": [str(x) for x in xs]},
        {"x": (0, 1), "names": []},
    ),
    "time first": (lambda xs: np.stack([np.array(xs)] * 3), (3, 0)),
    "edges": (edges, (2, 0)),
    "pairs": (lambda xs: torch.ones(len(xs), 5, len(xs)), (0, 5, 0)),
}

REFUSED: dict[str, tuple[Callable[[list[int]], Any], str]] = {
    "count": (lambda xs: {"n": torch.tensor(len(xs))}, r"batch\['n'\] is a Tensor"),
    "number": (lambda xs: [column(xs), len(xs)], r"batch\[1\] is a int"),
    "mean": (lambda xs: {"m": torch.tensor(xs).float().mean()}, r"batch\['m'\] is a Tensor"),
    "first": (lambda xs: {"a": {"m": torch.tensor(xs[:1])}}, r"batch\['a'\]\['m'\] is a Tensor"),
    "offsets": (lambda xs: torch.tensor([0, *xs]), r"batch is a Tensor: its shape is \(2,\)"),
    "text": (lambda xs: Pair(column(xs), f"{xs[0]}"), r"batch\[1\] is a str"),
    "graph": (lambda xs: Graph(column(xs)), "batch is a Graph"),
    "graphs": (lambda xs: Frozen([Graph(column(xs))]), r"batch\.x\[0\] is a Graph"),
    "cache": (lambda xs: Cached(column(xs)), "batch is a Cached: its attribute cache"),
    "set": (lambda xs: set(xs), "batch is a set"),
    "kinds": (lambda xs: xs if len(xs) > 1 else xs[0], "for two samples it is a list"),
}


def plain(batch: Any) -> Any:
    """Return a batch with shapes for arrays, dicts for mappings, lists for sequences."""
    if hasattr(batch, "shape"):
        return tuple(batch.shape)
    if hasattr(batch, "__dataclass_fields__"):
        return plain(vars(batch))
    if hasattr(batch, "items"):
        return {name: plain(part) for name, part in batch.items()}
    return batch if batch is None else [plain(part) for part in batch]


@pytest.mark.parametrize("name", KNOWN)
def test_an_empty_share(name: str) -> None:
    collate, expected = KNOWN[name]
    loader = DataLoader([10, 11, 12, 13, 14], 2, collate_fn=collate)  # type: ignore[arg-type]
    *_, last = prepare(loader, num_replicas=2, rank=1)
    assert type(last) is type(collate([10]))
    assert plain(last) == expected


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_batch_of_no_samples_is_known_of(name: str, rank: int) -> None:
    collate, text = REFUSED[name]

    def prepared(**options: Any) -> Any:
        loader = DataLoader([10, 11, 12, 13, 14], 2, collate_fn=collate, **options)  # type: ignore[arg-type]
        return prepare(loader, num_replicas=2, rank=rank)

    with pytest.raises(TypeError, match=text) as caught:
        prepared()
    assert "a batch of 1 of 5 samples for 2 ranks leaves a rank without" in str(caught.value)
    assert len(list(prepared(drop_last=True))) == 2


def test_workers_refuse_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They alone open what data sets open when they are read first."""
    from torch.utils.data import _utils

    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.01)  # torch waits for each to end
    loader = DataLoader([10, 11, 12, 13, 14], 2, collate_fn=Graph, num_workers=1)  # type: ignore[arg-type]
    for rank in range(2):
        with pytest.raises(TypeError, match="batch is a Graph"):
            next(iter(prepare(loader, num_replicas=2, rank=rank)))
    gc.collect()


@pytest.mark.parametrize(("size", "ranks"), [(1, 2), (8, 6), (3, 3)])
def test_batches_that_are_too_small(size: int, ranks: int) -> None:
    """All batches, the only batch, the last batch."""
    loader = DataLoader([1, 2, 3, 4, 5], size, collate_fn=Graph)  # type: ignore[arg-type]
    for rank in range(ranks):
        with pytest.raises(TypeError, match="batch is a Graph"):
            prepare(loader, num_replicas=ranks, rank=rank)


class Drawing(Dataset[Any]):
    """Draws from all global generators."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return random.random(), np.random.random(), torch.rand(1)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_empty_share_draws_no_random_numbers(workers: int) -> None:
    def drawn(size: int) -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        loader = DataLoader(Drawing(), size, num_workers=workers, collate_fn=list)
        return list(prepare(loader, num_replicas=2, rank=1))[:2]

    assert drawn(2) == drawn(2)
    one, other = (drawn(size) for size in (2, 3))  # the second has no empty share
    assert one[0] == other[0]
