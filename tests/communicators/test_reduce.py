"""Reductions on the host against torch, bit for bit where one rounding decides."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tagi_ddp.communicators.host.reduce import reduce_rows

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
