"""Files in the format of MNIST: what is read and what is refused."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support.clients import idx

from tagi_ddp.data import read_idx

ARRAYS = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5))


@given(ARRAYS, st.booleans())
def test_an_idx_file_is_read_as_it_was_written(tmp_path_factory, array, zipped):
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if zipped else "a")
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    result = read_idx(path)
    assert (result.shape, result.dtype) == (array.shape, np.uint8)
    np.testing.assert_array_equal(result, array)


@given(ARRAYS, st.booleans(), st.data())
def test_an_idx_file_of_another_length_is_refused(tmp_path_factory, array, zipped, data):
    content = gzip.compress(idx(array)) if zipped else idx(array)
    path = tmp_path_factory.mktemp("idx") / ("a.gz" if zipped else "a")
    length = data.draw(st.integers(0, len(content) - 1))
    path.write_bytes(data.draw(st.sampled_from([content[:length], content + b"more"])))
    with pytest.raises(ValueError, match=str(path)):
        read_idx(path)


@pytest.mark.parametrize("head", [b"\0\0\x0d\1", b"\x1f\x8b\0\0", b"PK\3\4"])
def test_a_file_of_another_format_is_refused(tmp_path, head):
    path = tmp_path / "a"
    path.write_bytes(head + bytes(100))
    with pytest.raises(ValueError, match=f"no idx file of bytes: it begins with {head.hex()}"):
        read_idx(path)


def test_a_damaged_gzip_file_is_refused(tmp_path):
    content = bytearray(gzip.compress(idx(np.arange(200, dtype=np.uint8))))
    content[10:20] = b"\xff" * 10
    path = tmp_path / "a.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{path} is not a whole gzip file"):
        read_idx(path)
