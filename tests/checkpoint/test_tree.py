"""What is saved is read back, of the same types and to the bit; what cannot be is refused."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tagi_ddp.checkpoint.tree import DamagedFile, Snapshot, equal, read_tree

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
TORCH = [torch.bfloat16, torch.half, torch.float, torch.double, torch.long, torch.bool]


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(
        lambda shape, dtype, seed: torch.randn(
            shape, generator=torch.Generator().manual_seed(seed)
        ).to(dtype),
        shapes,
        st.sampled_from(TORCH),
        st.integers(0, 99),
    )


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.text(),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
    ),
    st.sampled_from(["f4", "i8", "?"]).flatmap(
        lambda dtype: arrays.from_dtype(np.dtype(dtype)).map(np.dtype(dtype).type)
    ),
    tensors(),
)
KEYS = st.one_of(st.text(), st.integers(), st.sampled_from(["$array", "__metadata__", "a/b", "a"]))
TREES = st.recursive(
    LEAVES,
    lambda trees: st.one_of(
        st.lists(trees, max_size=4),
        st.tuples(trees, trees),
        st.dictionaries(KEYS, trees, max_size=4),
    ),
    max_leaves=12,
)


def write(path: Path, tree: Any) -> None:
    snapshot = Snapshot()
    snapshot.take(tree)
    with path.open("wb") as file:
        snapshot.write(file)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other or (math.isnan(one) and math.isnan(other))


@given(TREES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    write(path, tree)
    found = read_tree(path)
    assert_same(tree, found)
    assert equal(tree, found)


def test_one_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, {"a": {"b": {1: np.ones(2)}}, "c": 1})
    assert list(read_tree(path, "a", "b")) == [1]
    assert read_tree(path, "c") == 1


def test_other_programs_read_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tree = {"odd": np.ones(3, np.uint8), "model": {"mu": np.arange(5, dtype=np.float32)}}
    write(path, tree)
    found = load_file(path)
    assert sorted(found) == ["/model/mu", "/odd"]
    np.testing.assert_array_equal(found["/model/mu"], np.arange(5))


def test_a_copy_is_of_its_time(tmp_path: Path) -> None:
    """Memory is used again for the next copy, also of another shape."""
    array, snapshot = np.zeros(4, np.float32), Snapshot()
    for value, tree in ((1, {"a": array}), (2, {"a": array}), (3, {"a": array[:2], "b": array})):
        array[:] = value
        snapshot.take(tree)
        array[:] = -1
        with (tmp_path / "file").open("wb") as file:
            snapshot.write(file)
        found = read_tree(tmp_path / "file")
        assert {name: part.tolist() for name, part in found.items()} == {
            name: [value] * len(part) for name, part in tree.items()
        }


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"model": [1, {2}]}, r"model/1 is a set"),
        ({"x": np.array(["text"])}, r"x is an array of <U4"),
        ({"x": np.array([1], ">f4")}, r"x is an array of >f4"),
        ({"x": np.array([object()])}, r"x is an array of object"),
        ({"x": torch.ones(2).to_sparse()}, r"x is a tensor of torch.float32, torch.sparse_coo"),
        ({"x": torch.float32}, r"x is a dtype"),
        ({"x": OrderedDict(y=print)}, r"x/y is a builtin_function"),
    ],
)
def test_what_cannot_be_saved(tree: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        Snapshot().take(tree)


def test_equal_is_to_the_bit() -> None:
    one = {"a": np.array([0.0, np.nan]), "b": 1}
    assert equal(one, {"a": np.array([0.0, np.nan]), "b": 1})
    for other in (
        {"a": np.array([-0.0, np.nan]), "b": 1},
        {"a": np.array([0.0, np.nan]), "b": 2},
        {"a": np.array([0.0, np.nan], np.float32), "b": 1},
        {"a": np.array([[0.0, np.nan]]), "b": 1},
        {"a": np.array([0.0, np.nan])},
    ):
        assert not equal(one, other)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path, {"a": np.arange(100), "b": 2})
    whole = path.read_bytes()
    header = struct.unpack("<Q", whole[:8])[0]
    for cut in (0, 4, 8, 8 + header // 2, 8 + header, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(DamagedFile, match="is no checkpoint, or not all of one"):
            read_tree(path)
    path.write_bytes(whole)
    assert read_tree(path, "b") == 2
    with pytest.raises(DamagedFile):
        read_tree(path, "no such")
