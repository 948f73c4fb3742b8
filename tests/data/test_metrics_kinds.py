"""Whatever array or tensor is given: its values in its dtype, or an error that names it."""

from __future__ import annotations

import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.rank_pool import RankPool
from support.reports import NO_ERROR, report_if_any

from tagi_ddp.communicators.single import SingleCommunicator
from tagi_ddp.data import gather, reduce_metrics

OF_NUMPY = ["?", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16", ">f4", ">i2"]
OF_TORCH = [
    *(torch.bool, torch.uint8, torch.int16, torch.int64, torch.half, torch.float, torch.double),
    *(torch.bfloat16, torch.cfloat, torch.cdouble, torch.float8_e4m3fn),
]
KINDS = ["plain", "every other", "backwards", "list", "masked", "mask of nothing", "numbers"]
KINDS_OF_TENSORS = ["plain", "every other", "transposed", "gradient", "parameter", "conjugate"]
KINDS_OF_TENSORS += ["negative", "sparse", "meta", "list of tensors"]

Case = tuple[Any, Any, str]  # what is given, the array that it is, who refuses it: "", g, r or gr


def array(draw: random.Random, count: int | None = None, width: tuple[int, ...] = ()) -> Case:
    """Return an array of ``count`` rows, or of no dimension."""
    dtype, kind = np.dtype(draw.choice(OF_NUMPY)), draw.choice(KINDS)
    shape = width if count is None else (count, *width)
    values = np.random.default_rng(draw.randrange(99)).integers(0, 2, (2, *shape, 2))
    made = (values[0] * 1.5 if dtype.kind in "fc" else values[0])[..., 0].astype(dtype)
    if dtype.kind == "c":
        made = made + (values[1, ..., 0] * 1j).astype(dtype)
    refused = "r" if dtype.kind == "c" else ""
    if kind == "every other" and count:
        whole = np.repeat(made, 2, 0)
        return whole[::2], made, refused
    if kind == "backwards" and count:
        return made[::-1], made[::-1], refused
    if kind in ("list", "numbers") and made.ndim == 1 and made.size:
        given = list(made) if kind == "list" and dtype.isnative else made.tolist()
        return given, np.asarray(given), refused
    if kind == "masked" and made.size:
        mask = np.zeros(made.shape, bool)
        mask[...] = True
        return np.ma.masked_array(made, mask), made, "gr"
    if kind == "mask of nothing":
        return np.ma.masked_array(made), made, refused
    return made, made, refused


def tensor(draw: random.Random, count: int | None = None, width: tuple[int, ...] = ()) -> Case:
    dtype, kind = draw.choice(OF_TORCH), draw.choice(KINDS_OF_TENSORS)
    shape = width if count is None else (count, *width)
    generator = torch.Generator().manual_seed(draw.randrange(99))
    made = torch.view_as_complex(torch.randint(0, 2, (*shape, 2), generator=generator) * 1.5)
    made = made.to(dtype) if dtype.is_complex else made.real.to(dtype)
    refused = "r" if dtype.is_complex else ""
    if dtype in (torch.bfloat16, torch.float8_e4m3fn):
        refused = "g"
    given = made
    if kind == "every other" and count:
        given = made.repeat_interleave(2, 0)[::2] if dtype.itemsize > 1 else made
    elif kind == "transposed":
        given = made.mT.contiguous().mT if made.ndim > 1 else made
    elif kind == "gradient" and dtype.is_floating_point and dtype.itemsize > 1:
        given = made.clone().requires_grad_()
    elif kind == "parameter":
        given = torch.nn.Parameter(made, requires_grad=False)
    elif kind == "conjugate" and dtype.is_complex:
        given, made = made.conj(), made.conj().resolve_conj()
    elif kind == "negative" and dtype.is_complex:
        given = made.conj().imag
        made, refused = -made.imag, ""
    elif kind == "sparse" and dtype == torch.float and made.ndim:
        given, refused = made.to_sparse(), "gr"
    elif kind == "meta":
        given, refused = made.to("meta"), "gr"
    elif kind == "list of tensors" and count and not width and refused == "":
        given = list(made)
        made = torch.stack(given)
    exact = made.double() if made.dtype in (torch.bfloat16, torch.float8_e4m3fn) else made
    return given, exact.resolve_neg().numpy(), refused


def case(draw: random.Random, count: int | None, width: tuple[int, ...]) -> Case:
    return draw.choice([array, tensor])(draw, count, width)


def check_gather(comm: Any, seed: int) -> None:
    """Gather rows that are of one dtype and kind on all ranks, but for their number."""
    draw = random.Random(seed)
    width = draw.choice([(), (), (3,), (2, 0), (2, 2)])
    state = draw.getstate()
    counts = [draw.randrange(4) for _ in range(comm.size)]
    parts = []
    for count in counts:
        draw.setstate(state)  # of the same kind
        parts.append(case(draw, count, width))
    given, _, _ = parts[comm.rank]
    refused = any("g" in refusal for *_, refusal in parts)
    dtypes = {part.dtype.newbyteorder("=") for _, part, _ in parts}
    found: list[Any] = []
    kind, text, _ = report_if_any(lambda: found.append(gather(comm, given)))
    if refused:
        assert kind in ("ValueError", "RanksDiffer"), (seed, kind, text)
        assert "rows" in text, (seed, text)
    elif len(dtypes) > 1:  # of an empty list
        assert "the dtype of rows" in text, (seed, text)
    else:
        assert kind == NO_ERROR[0], (seed, kind, text)
        assert found[0].dtype == dtypes.pop(), seed
        np.testing.assert_array_equal(found[0], np.concatenate([part for _, part, _ in parts]))


def check_reduce(comm: Any, seed: int) -> None:
    draw = random.Random(seed)
    count, width = draw.choice([None, 0, 1, 3]), draw.choice([(), (2,)])
    if count is None:
        width = ()
    given, totals, refused = case(draw, count, width)
    found: list[Any] = []
    kind, text, _ = report_if_any(lambda: found.append(reduce_metrics(comm, given, 2)))
    if "r" in refused:
        assert kind in ("ValueError", "RanksDiffer"), (seed, kind, text)
        assert "total" in text, (seed, text)
    else:
        assert kind == NO_ERROR[0], (seed, kind, text)
        expected = totals.astype(np.float64) * comm.size / (2 * comm.size)
        assert type(found[0]) is (np.ndarray if totals.ndim else float), seed
        np.testing.assert_array_equal(found[0], expected)


@given(st.integers(0, 2**32))
def test_one_rank(seed: int) -> None:
    check_gather(SingleCommunicator(), seed)
    check_reduce(SingleCommunicator(), seed)


def many(comm: Any, first: int, end: int) -> None:
    for seed in range(first, end):
        check_gather(comm, seed)
        check_reduce(comm, seed)


def test_two_ranks(shm: RankPool) -> None:
    shm.run(many, 0, 150, size=2)


@pytest.mark.slow
def test_two_ranks_for_long(shm: RankPool) -> None:
    shm.run(many, 300, 10_000, size=2, limit=300)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (torch.ones(2, dtype=torch.bfloat16), r"rows is a tensor of torch.bfloat16, .* rows.float"),
        ([torch.ones(2, dtype=torch.bfloat16)], "rows is a tensor of torch.bfloat16"),
        (torch.ones(2).to_sparse(), "rows is a tensor of torch.sparse_coo on cpu: give a dense"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), r"rows has masked numbers, .* rows.filled"),
        ([np.ma.masked_array([1.0], [True]), [2.0]], "rows has masked numbers"),
        ([np.ma.masked], "rows has masked numbers"),
        ([[1.0], [1.0, 2.0]], "rows must be an array of numbers: .*inhomogeneous"),
        ([None], "rows must be numbers, got object"),
        (np.ones(1, [("a", "i4")]), "rows must be numbers, got"),
        (np.array(["2020-01-01"], "M8[D]"), "rows must be numbers, got datetime64"),
    ],
)
def test_what_gather_refuses(rows: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gather(SingleCommunicator(), rows)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0.0, 1.0], "indices must be integers, got float64"),
        ([True, False], "indices must be integers, got bool"),
        (["0", "1"], "indices must be integers, got <U1"),
        (np.ma.masked_array([0, 1], [False, True]), "indices has masked numbers"),
        (torch.arange(2).to("meta"), "indices is a tensor of torch.strided on meta"),
    ],
)
def test_indices_that_are_none(indices: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        gather(SingleCommunicator(), [1.0, 2.0], indices)


@pytest.mark.parametrize(
    ("total", "text"),
    [
        (1j, "total must be real numbers, got complex128: give total.real and total.imag apart"),
        (np.ones(2, np.complex64), "total must be real numbers, got complex64"),
        (torch.ones(2, dtype=torch.cfloat), "total must be real numbers, got complex64"),
        ("3", "total must be real numbers, got <U1"),
        ([1.0, None], "total must be real numbers, got object"),
        (np.ma.masked, "total has masked numbers, and masks are not exchanged"),
        ({"loss": 1.0}, "total must be real numbers, got object"),
    ],
)
def test_what_reduce_metrics_refuses(total: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        reduce_metrics(SingleCommunicator(), total, 2)


def test_numbers_of_other_types() -> None:
    for total in (3, 3.0, True * 3, np.float16(3), Fraction(3), Decimal(3), torch.tensor(3)):
        assert reduce_metrics(SingleCommunicator(), total, 2) == 1.5
    assert reduce_metrics(SingleCommunicator(), 10**30, 1) == 1e30
    places = gather(SingleCommunicator(), [1.0, 2.0], torch.tensor([1, 0]))
    assert places.tolist() == [2.0, 1.0]
    assert gather(SingleCommunicator(), [1j, 2]).tolist() == [1j, 2]
