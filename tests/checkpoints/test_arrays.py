# SPDX-License-Identifier: Apache-2.0
"""The safetensors file of a checkpoint: what is written is read by safetensors itself, and the other way round."""

import io
import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save

from etude.checkpoints.codec import Arrays, write_arrays
from etude.errors import CheckpointError

DTYPES = [np.dtype(name) for name in ("?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8")]
ARRAYS = st.dictionaries(
    st.text("ab/é~", min_size=1, max_size=4),
    st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0))),
    max_size=4,
)


@given(ARRAYS)
def test_safetensors_reads_what_is_written_and_so_do_we(tmp_path_factory, arrays):
    folder = tmp_path_factory.mktemp("arrays")
    state = write_arrays(folder / "x", arrays)
    path = folder / "x"
    assert path.stat().st_size == state["bytes"]
    with open(path, "rb") as file:
        back = dict(Arrays(file, state, "x"))
    for found in (load_file(path), back):
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()


@given(ARRAYS)
def test_what_safetensors_writes_is_read(arrays):
    data = save(arrays)
    head = data[: 8 + int.from_bytes(data[:8], "little")]
    sums = {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}
    state = {"bytes": len(data), "header": zlib.crc32(head), "crc32": sums}
    back = Arrays(io.BytesIO(data), state, "x")
    assert len(back) == len(arrays)
    assert all(back[name].tobytes() == array.tobytes() for name, array in arrays.items())


def test_only_what_is_asked_for_is_read(tmp_path):
    state = write_arrays(tmp_path / "x", {"a": np.arange(1000), "b": np.arange(5.0)})
    data = bytearray((tmp_path / "x").read_bytes())
    data[-1] ^= 1
    arrays = Arrays(io.BytesIO(data), state, "x")
    assert arrays["a"].tolist() == list(range(1000))
    with pytest.raises(CheckpointError, match="x is broken: its content does not match its checksum"):
        arrays["b"]


def _file(header, data=b"\0" * 8):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    return head + data, {"bytes": len(head + data), "header": zlib.crc32(head), "crc32": {"a": zlib.crc32(data)}}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[", "its header can't be read"),
        ([1], "its header can't be read"),
        ({"a": {"dtype": "C9", "shape": [], "data_offsets": [0, 8]}}, "its header can't be read"),
        ({"a": {"dtype": "F64", "shape": [2], "data_offsets": [0, 8]}}, "a shape does not fit its bytes"),
        ({"a": {"dtype": "F64", "shape": [-1], "data_offsets": [8, 0]}}, "a shape does not fit its bytes"),
        ({"a": {"dtype": "F64", "shape": [1], "data_offsets": [8, 16]}}, "an array is outside of the file"),
        ({"a": {"dtype": "F64", "shape": [1], "data_offsets": [-8, 0]}}, "an array is outside of the file"),
    ],
)
def test_a_forged_header_is_named(header, message):
    data, state = _file(header)
    with pytest.raises(CheckpointError, match=message):
        Arrays(io.BytesIO(data), state, "x")["a"]


def test_a_broken_header_is_named():
    data, state = _file({"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}})
    for broken in (b"\xff" * 8 + data[8:], data.replace(b"F64", b"I64")):
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            Arrays(io.BytesIO(broken), state, "x")
