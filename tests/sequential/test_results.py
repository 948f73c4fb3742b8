"""Results of map_networks: the same on all ranks, whole or refused."""

from __future__ import annotations

import datetime
import enum
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.rank_pool import RankPool

from tagi_ddp import MapError, map_networks


class Level(enum.IntEnum):
    LOW = 1


numbers = st.one_of(
    st.integers(),
    st.sampled_from([2**63, -(2**64), 2**200]),
    st.floats(),
    st.complex_numbers(allow_nan=True),
    st.booleans(),
)
keys = st.recursive(
    st.none() | numbers | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.array_dtypes(),
    st.sampled_from([np.dtype(np.longdouble), np.dtype(np.clongdouble)]),
)
arrays = dtypes.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_side=3)))
others = st.one_of(
    st.dates(),
    st.datetimes(),
    st.sampled_from([object(), {1, 2}, range(3), Level.LOW, Level, np.array([1, None, 1j])]),
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.lists(inner, max_size=3).map(lambda parts: np.array([*parts, None], object)[:-1])
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        objects,
    )


leaves = st.one_of(keys, arrays, arrays.filter(np.size).map(lambda array: array.flat[0]), others)
values = st.recursive(leaves, containers, max_leaves=8)


def plain(value: Any) -> Any:
    """Return what map_networks should return of a value; TypeError if it should refuse it."""
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind not in "biufcUSO" or value.dtype.char in "gG":
            raise TypeError
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return type(value)(plain(part) for part in value)
    if isinstance(value, dict):
        return {plain(key): plain(part) for key, part in value.items()}
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, Level):
        return int(value)
    raise TypeError


def same(a: Any, b: Any) -> bool:
    """Return whether two values have one type and are equal. NaN equals NaN; 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, complex):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, float):
        both = math.isnan(a) and math.isnan(b)
        return both or (a, math.copysign(1, a)) == (b, math.copysign(1, b))
    return bool(a == b)


def outcome(items: list[Any], communicator: Any = None) -> tuple[list[Any], dict[int, str]]:
    """Return results and errors of a map that returns its items."""
    try:
        return map_networks(lambda item: item, items, communicator=communicator), {}
    except MapError as error:
        return error.results, error.errors


@given(st.lists(values, max_size=4))
def test_a_value_travels_whole_or_is_refused_by_item(items: list[Any]) -> None:
    results, errors = outcome(items)
    for index, (item, result) in enumerate(zip(items, results, strict=True)):
        try:
            expected = plain(item)
        except TypeError:
            assert "TypeError: train returned" in errors[index]
            assert result is None
        else:
            assert index not in errors
            assert same(result, expected)


def map_on_ranks(communicator: Any, items: list[Any]) -> Any:
    return outcome(items, communicator)


@pytest.mark.slow
@settings(max_examples=3000)
@given(st.lists(values, max_size=4))
def test_many_values_travel_whole_or_are_refused(items: list[Any]) -> None:
    test_a_value_travels_whole_or_is_refused_by_item.hypothesis.inner_test(items)  # type: ignore[attr-defined]


@settings(max_examples=40)
@given(items=st.lists(values, min_size=1, max_size=4))
def test_all_ranks_have_what_one_alone_has(shm: RankPool, items: list[Any]) -> None:
    results, errors = outcome(items)
    for theirs, failed in shm.run(map_on_ranks, items, size=3):
        assert same(theirs, results)
        assert failed.keys() == errors.keys()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.array(["2024-01-01"], "M8[s]"), "train returned an array of datetime64[s]"),
        (np.datetime64("2024-01-01"), "train returned a datetime64[D]"),
        ({"when": [datetime.date(2024, 1, 1)]}, "train returned a date;"),
        (np.zeros(2, [("a", "i4")]), "train returned an array of [('a', '<i4')]"),
        ({1: {2}}, "train returned a set;"),
    ],
)
def test_what_is_refused_is_named(value: Any, text: str) -> None:
    results, errors = outcome([0, value])
    assert results == [0, None]
    assert text in errors[1]


def test_an_integer_may_have_thousands_of_digits() -> None:
    results, _ = outcome([10**5000, -(10**5000)])
    assert results[0] == 10**5000
    assert results[1] == -results[0]


def test_what_has_no_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = 0
    for _ in range(10**5):
        deep = [deep]
    results, errors = outcome([endless, 1, deep])
    assert results == [None, 1, None]
    assert sorted(errors) == [0, 2]
