"""Reductions on the host against torch, bit for bit where one rounding decides."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tagi_ddp.communicators.reduce import encode, reduce_rows

ROWS = st.tuples(st.integers(1, 4), st.integers(1, 8))
WIDE = st.floats(width=32, allow_nan=True, allow_infinity=True)


@given(rows=arrays.arrays(np.float32, ROWS, elements=WIDE), op=st.sampled_from(["sum", "mean"]))
def test_bfloat16(rows: np.ndarray, op: str) -> None:
    tensors = torch.from_numpy(rows).bfloat16()
    out = np.empty(rows.shape[1], np.uint16)
    reduce_rows(tensors.view(torch.int16).numpy().view(np.uint16), "bfloat16", op, out, len(rows))
    total = torch.zeros(rows.shape[1])
    for i, row in enumerate(tensors.float()):
        total = row if i == 0 else total + row
    expected = (total / len(rows) if op == "mean" else total).bfloat16()
    got = torch.from_numpy(out.view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[~got.isnan()], expected[~expected.isnan()])


@given(
    rows=arrays.arrays(np.float16, ROWS, elements=st.floats(width=16)),
    op=st.sampled_from(["sum", "mean", "min", "max"]),
)
def test_float16(rows: np.ndarray, op: str) -> None:
    kept = rows.copy()
    out = np.empty(rows.shape[1], np.float16)
    reduce_rows(rows, "float16", op, out, len(rows))
    wide = rows.astype(np.float32)
    with np.errstate(all="ignore"):
        if op in ("min", "max"):
            expected = getattr(wide, op)(axis=0)
        else:
            expected = wide[0].copy()
            for row in wide[1:]:
                expected += row
            expected = expected / np.float32(len(rows)) if op == "mean" else expected
        expected = expected.astype(np.float16)
    assert np.array_equal(out, expected, equal_nan=True)
    assert np.array_equal(rows, kept, equal_nan=True), "the input was written to"


@given(
    rows=st.sampled_from([np.float32, np.float64, np.int8, np.uint64]).flatmap(
        lambda dtype: arrays.arrays(dtype, ROWS)
    ),
    op=st.sampled_from(["sum", "min", "max"]),
)
def test_other_types(rows: np.ndarray, op: str) -> None:
    kept = rows.copy()
    out = np.empty(rows.shape[1], rows.dtype)
    reduce_rows(rows, rows.dtype.name, op, out, len(rows))
    with np.errstate(all="ignore"):
        expected = rows[0].copy()
        for row in rows[1:]:
            expected = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op](expected, row)
    assert out.tobytes() == expected.tobytes() or np.array_equal(out, expected, equal_nan=True)
    assert rows.tobytes() == kept.tobytes(), "the input was written to"


KNOWN = {
    "gloo": ("float32", "float64", "int8", "uint8", "int32", "int64"),
    "mpi": tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
TYPES = [np.float32, np.float64, np.int8, np.int16, np.uint16, np.uint32, np.int64, np.uint64]


@given(
    rows=st.sampled_from(TYPES).flatmap(lambda dtype: arrays.arrays(dtype, ROWS)),
    op=st.sampled_from(["sum", "min", "max"]),
    library=st.sampled_from(sorted(KNOWN)),
)
def test_what_a_library_reduces_instead(rows: np.ndarray, op: str, library: str) -> None:
    """It is of a type that the library knows, and its result is decoded to the right one."""
    kept = rows.copy()
    encoded, decoders = zip(*(encode(row, op, KNOWN[library]) for row in rows), strict=True)
    assert {each.dtype.name for each in encoded} <= {*KNOWN[library], "float32", "float64"}
    ufunc = {"sum": np.add, "min": np.minimum, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        found, expected = encoded[0].copy(), rows[0].copy()
        for each, row in zip(encoded[1:], rows[1:], strict=True):
            found, expected = ufunc(found, each), ufunc(expected, row)
        found = decoders[0](found)
    assert found.dtype == rows.dtype
    assert np.array_equal(found, expected, equal_nan=rows.dtype.kind == "f")
    if op != "sum" and rows.dtype.kind == "f":  # in any order of the ranks, to the bit
        order = [ufunc.reduce(np.stack(way)) for way in (encoded, encoded[::-1])]
        assert order[0].tobytes() == order[1].tobytes()
    assert rows.tobytes() == kept.tobytes(), "the input was written to"
