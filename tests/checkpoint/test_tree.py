"""Saved values are read back with types and bits. Values that no file can hold are refused."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tagi_ddp.checkpoint.tree import DamagedFile, Snapshot, equal, read_tree

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
TORCH = [torch.bfloat16, torch.half, torch.float, torch.double, torch.bool]
TORCH += [torch.uint8, torch.int8, torch.short, torch.int, torch.long]
TORCH += [torch.uint16, torch.uint32, torch.uint64]
TORCH += [torch.chalf, torch.cfloat, torch.cdouble]


def tensor(shape: list[int], dtype: torch.dtype, seed: int, view: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.view_as_complex(torch.randn([*shape, 2], generator=generator) * 9)
    if not dtype.is_complex:
        made = made.real.abs()
    made = made.to(dtype)
    if view == "transposed":
        return made.permute(list(range(made.ndim))[::-1])
    if view == "conjugate":
        return made.conj()
    if view == "negative" and dtype.is_complex and dtype != torch.chalf:
        return made.conj().imag
    return made.requires_grad_() if view == "gradient" and made.is_floating_point() else made


def tensors() -> st.SearchStrategy[torch.Tensor]:
    return st.builds(
        tensor,
        st.lists(st.integers(0, 3), max_size=3),
        st.sampled_from(TORCH),
        st.integers(0, 99),
        st.sampled_from(["", "transposed", "conjugate", "negative", "gradient"]),
    )


def ndarrays(dtype: str) -> st.SearchStrategy[Any]:
    shapes = arrays.array_shapes(min_dims=0, min_side=0, max_side=4)
    views = [lambda a: a, lambda a: a.T, lambda a: a[..., ::-1] if a.ndim else a]
    return st.builds(
        lambda array, view: view(array), arrays.arrays(dtype, shapes), st.sampled_from(views)
    )


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.sampled_from([2**1023, 2**1024, -(2**1030)]),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.just("half a character: \ud800"),
    st.sampled_from(DTYPES).flatmap(ndarrays),
    st.sampled_from(DTYPES).flatmap(
        lambda dtype: arrays.from_dtype(np.dtype(dtype)).map(np.dtype(dtype).type)
    ),
    tensors(),
)
KEYS = st.one_of(
    st.text(),
    st.integers(),
    st.booleans(),
    st.none(),
    st.sampled_from(["$array", "$Counter", "__metadata__", "a/b", "a", "\ud800"]),
    st.sampled_from([1.5, np.int32(3), (1, "a"), 2j]),
)
FACTORIES = [None, bool, int, float, str, list, dict, set, tuple]


def with_attribute(made: Any, value: Any) -> Any:
    made._metadata = value
    return made


def nested(trees: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, trees, max_size=4)
    return st.one_of(
        st.lists(trees, max_size=4),
        st.tuples(trees, trees),
        dicts,
        dicts.map(OrderedDict),
        dicts.map(Counter),
        st.builds(with_attribute, dicts.map(OrderedDict), trees),
        st.builds(defaultdict, st.sampled_from(FACTORIES), dicts),
    )


TREES = st.recursive(LEAVES, nested, max_leaves=12)


class Pair(NamedTuple):
    a: int = 1
    b: int = 2


class Kind(enum.Enum):
    A = 1


class Number(enum.IntEnum):
    A = 1


class Text(str):
    __slots__ = ()


class Words(str, enum.Enum):
    A = "a"


class Integer(int):
    pass


class Real(float):
    pass


class Dict(dict[str, Any]):
    pass


class List(list[Any]):
    pass


class Tally(Counter[str]):
    pass


class Array(np.ndarray[Any, Any]):
    pass


def unknown() -> list[Any]:
    """Return what a file cannot hold, or not with its type."""
    endless: list[Any] = []
    endless.append(endless)
    return [
        {1},
        frozenset(),
        b"bytes",
        bytearray(2),
        range(3),
        1 + Fraction(1, 2),
        Decimal(1),
        Path("/"),
        print,
        Kind.A,
        Number.A,
        Words.A,
        Text("a"),
        Integer(1),
        Real(1),
        Pair(),
        List([1]),
        Dict(a=1),
        Tally("ab"),
        UserDict(a=1),
        MappingProxyType({"a": 1}),
        defaultdict(lambda: 0),
        defaultdict(Integer),
        deque([1]),
        endless,
        {Text("key"): 1},
        {Number.A: 1},
        {frozenset(): 1},
        {torch.ones(1): 1},
        np.ma.masked_array([1.0], [True]),
        np.ones(2).view(Array),
        np.rec.array([(1,)], dtype=[("a", "i4")]),
        np.ones(2, [("a", "i4")]),
        np.ones(2, ">f4"),
        np.ones(2, ">c8"),
        np.ones(2, np.longdouble),
        np.longdouble(1),
        np.ones(2, np.clongdouble),
        np.array(["text"]),
        np.str_("text"),
        np.bytes_(b"text"),
        np.datetime64("2020-01-01"),
        np.array([None]),
        np.dtype("f4"),
        torch.nn.Parameter(torch.ones(1)),
        torch.Size([1]),
        torch.ones(2).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        torch.zeros(2, dtype=torch.uint8).view(torch.qint8),
        torch.float32,
        torch.device("cpu"),
    ]


ALL_TREES = st.recursive(
    st.one_of(LEAVES, st.integers(0, len(unknown()) - 1).map(lambda i: unknown()[i])),
    nested,
    max_leaves=6,
)


def write(path: Path, tree: Any) -> None:
    snapshot = Snapshot()
    snapshot.take(tree)
    with path.open("wb") as file:
        snapshot.write(file)


def attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        for pair in zip(one.items(), other.items(), strict=True):
            assert_same(*pair)
        assert getattr(one, "default_factory", 0) is getattr(other, "default_factory", 0)
        assert_same(list(attributes(one).items()), list(attributes(other).items()))
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        one, other = (part.detach().resolve_conj().resolve_neg() for part in (one, other))
        assert one.tolist() == other.tolist() or one.is_floating_point()
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, complex):
        assert_same((one.real, one.imag), (other.real, other.imag))
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other) or math.isnan(one + other)
    else:
        assert one == other


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(TREES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    write(path, tree)
    found = read_tree(path)
    assert_same(tree, found)
    assert equal(tree, found)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(ALL_TREES)
def test_what_is_not_refused_by_name_comes_back_with_its_type(
    tmp_path_factory: pytest.TempPathFactory, tree: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "all.safetensors"
    try:
        write(path, {"entry": tree})
    except TypeError as error:
        assert str(error).startswith("entry")  # noqa: PT017
    else:
        assert_same({"entry": tree}, read_tree(path))


@pytest.mark.parametrize("number", range(len(unknown())))
def test_what_has_no_place_in_a_file(number: int) -> None:
    for tree in (unknown()[number], [unknown()[number]], {"a": unknown()[number]}):
        with pytest.raises(TypeError, match=r"^entry"):
            Snapshot().take({"entry": tree})


def with_bits(dtype: torch.dtype) -> torch.Tensor:
    """Return six numbers, of all kinds of bits, in two rows."""
    generator = torch.Generator().manual_seed(0)
    high = 2 if dtype == torch.bool else 256
    size = 6 * dtype.itemsize
    bits = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(2, 3)


ALL_DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str
)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_every_dtype_of_torch(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also those that torch cannot compute with; but for quantized ones, which have a scale."""
    made = with_bits(dtype)
    if str(dtype).startswith("torch.q"):
        with pytest.raises(
            TypeError, match=rf"^entry is a tensor of {dtype}, torch.strided, which"
        ):
            Snapshot().take({"entry": made})
        return
    views = [made, made.T, made[:, 1:], made[0, 0], made[:0], torch.nn.Parameter(made, False).data]
    write(tmp_path / "file", {"views": views})
    for read, view in zip(read_tree(tmp_path / "file")["views"], views, strict=True):
        assert (read.dtype, read.shape) == (view.dtype, view.shape)
        assert equal(read, view)
    read = read_tree(tmp_path / "file")["views"][0]
    assert torch.equal(read.view(torch.uint8), made.view(torch.uint8))


def test_a_dtype_that_another_torch_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "file", with_bits(torch.float8_e8m0fnu))
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    with pytest.raises(DamagedFile, match="a float8_e8m0fnu tensor, which this version of torch"):
        read_tree(tmp_path / "file")


def test_a_modules_state_with_the_versions_of_its_parts(tmp_path: Path) -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()
    write(tmp_path / "file", {"parts": {"net": state}})
    found = read_tree(tmp_path / "file", "parts", "net")
    assert found._metadata == state._metadata != {}
    torch.testing.assert_close(
        read_tree(tmp_path / "file", "parts", "net", "0.running_var"), torch.ones(2)
    )


def test_an_int_of_more_digits_than_python_prints(tmp_path: Path) -> None:
    write(tmp_path / "file", {"a": -(10**5000)})
    assert read_tree(tmp_path / "file", "a") == -(10**5000)
    with pytest.raises(TypeError, match=r"^entry has a key that is a int"):
        Snapshot().take({"entry": {10**5000: 1}})


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


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (0.0, -0.0),
        ({1: 0}, {True: 0}),
        ((1,), [1]),
        (Counter(a=1), {"a": 1}),
        (Counter(a=1), OrderedDict(a=1)),
        (defaultdict(int), defaultdict(float)),
        (np.float32(1), np.array(1, np.float32)),
        (np.ones(1), torch.ones(1, dtype=torch.double)),
        (1j, np.complex128(1j)),
    ],
)
def test_equal_is_of_the_same_type(one: Any, other: Any) -> None:
    assert equal({"a": one}, {"a": one})
    assert not equal({"a": one}, {"a": other})


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


@pytest.mark.parametrize(
    "tree",
    [
        '{"$array": 3}',
        '{"$float": "x"}',
        '{"$items": [[1]]}',
        '{"$later": 1}',
        "3",
        '{"a": 3}',
        "[" * 100_000 + "]" * 100_000,
    ],
)
def test_what_is_json_but_no_tree(tmp_path: Path, tree: str) -> None:
    header = json.dumps({"__metadata__": {"tree": tree}}).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(DamagedFile, match="is no checkpoint, or not all of one"):
        read_tree(tmp_path / "file", *("ab" if tree[1:4] == '"a"' or tree == "3" else ""))
