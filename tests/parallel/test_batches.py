"""The batches of the trainer: types of containers, and dtypes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from parallel.test_mixin import SGD, settings
from tagi_ddp.parallel import ParallelMixin, Task
from tagi_ddp.parallel.batches import take


class Pair(NamedTuple):
    x: Any
    y: Any


class Samples(Dataset[Any]):
    """Six samples, each made by a function of its index."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def net(*dtypes: torch.dtype) -> nn.Module:
    return nn.ParameterList(
        nn.Parameter(torch.ones(1).to(dtype), dtype.is_floating_point or dtype.is_complex)
        for dtype in dtypes
    )


@pytest.mark.parametrize("indices", [[1, 2], []])
@pytest.mark.parametrize("model", [net(torch.double), net()])
def test_batches_keep_the_types_of_samples(indices: list[int], model: nn.Module) -> None:
    """Also those of a rank without samples, which a network may have."""
    dtype = torch.double if len(list(model.parameters())) else torch.float
    numbers = np.array(indices, np.int64)
    arrays = np.arange(6, dtype=np.float32), np.arange(6)
    batch = take(Pair(*arrays), numbers, model)
    assert type(batch) is Pair
    assert batch.x.tolist() == indices
    sample = Samples(lambda i: Pair(torch.tensor(float(i)), UserDict(z=(i, "text"))))
    batch = take(sample, numbers, model)
    assert type(batch) is Pair
    assert type(batch.y) is UserDict
    assert (batch.x.tolist(), batch.x.dtype) == (indices, dtype)
    assert [list(part) for part in batch.y["z"]] == [indices, ["text"] * len(indices)]


@pytest.mark.parametrize(
    ("dtypes", "floats"),
    [
        ([torch.float], [torch.float, torch.float, torch.float]),
        ([torch.half], [torch.half, torch.half, torch.half]),
        ([torch.half, torch.float], [torch.half, torch.float, torch.float]),
        ([torch.bfloat16, torch.half], [torch.half, torch.float, torch.float]),
        ([torch.float, torch.double], [torch.double, torch.float, torch.double]),
        ([torch.cfloat], [torch.float, torch.float, torch.float]),
        ([torch.cdouble, torch.double], [torch.double, torch.double, torch.double]),
        ([torch.long, torch.float], [torch.float, torch.float, torch.float]),
        ([torch.bool], [torch.half, torch.float, torch.double]),
        ([torch.float8_e4m3fn, torch.float], [torch.float, torch.float, torch.float]),
    ],
)
def test_dtypes_of_floats(dtypes: list[torch.dtype], floats: list[torch.dtype]) -> None:
    """No float is narrowed unless no parameter is as wide; integers and complex numbers stay."""
    given = [torch.half, torch.float, torch.double, torch.long, torch.bool, torch.cfloat]
    batch = take(tuple(torch.ones(3).to(dtype) for dtype in given), np.arange(2), net(*dtypes))
    assert [part.dtype for part in batch] == [*floats, *given[3:]]


class Mixed(nn.Module):
    """An embedding of bfloat16, a filter of complex numbers, a head of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
        self.embed = nn.Embedding(6, 4, dtype=torch.bfloat16)
        self.head = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        assert batch.x.dtype is torch.long
        spectrum = torch.fft.rfft(self.embed(batch.x).float()) * self.filter
        return self.head(torch.fft.irfft(spectrum, n=4))


class Fit(Task):
    def run_model(self, model: Any, batch: Any, state: Any) -> Any:
        return model(batch)

    def compute_loss(self, model: Any, batch: Any, state: Any, output: Any) -> Any:
        assert batch.y.dtype is output.dtype
        return (output[:, 0] - batch.y).square().mean()


@pytest.mark.parametrize("double", [False, True])
def test_a_module_of_several_dtypes_trains(tmp_path: Path, double: bool) -> None:
    model = Mixed()
    if double:
        model.forward = lambda batch: model.head(model.filter.abs().sum() + model.embed(batch.x))  # type: ignore[method-assign]
    data, folder = Pair(np.arange(6), np.linspace(0, 1, 6)), str(tmp_path)
    with ParallelMixin(settings(folder, use_double_weight_precision=double)) as trainer:
        trainer.train(Fit(), model, data, epochs=1, batch_size=3, optimizer=SGD)
    kinds = (torch.cdouble, torch.double) if double else (torch.cfloat, torch.float)
    assert (model.filter.dtype, model.head.weight.dtype) == kinds
