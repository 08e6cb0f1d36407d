# SPDX-License-Identifier: Apache-2.0
"""msgpack with arrays against the values that were written, the quick way against the slow one."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from some_rllib import coded, mutated

from etude.errors import DataError
from etude.recordings.formats.msgpack_numpy import MsgpackReader, unpack

ARRAYS = [
    np.arange(6, dtype="<f4").reshape(2, 3),
    np.array([True, False]),
    np.zeros((0, 3), "<i8"),
    np.array(2.5, "<f8"),
    np.arange(3, dtype=">i4"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_come_back(array):
    got = unpack(msgpack.packb(coded(array)))
    np.testing.assert_array_equal(got, array)
    assert got.dtype == array.dtype.newbyteorder("=")
    assert got.shape == array.shape


def test_plain_values_and_integer_keys_come_back():
    value = {"a": [1, -2, 2.5, None, True, "x", b"y"], 7: {"b": []}, "s": np.float32(1.5)}
    assert unpack(msgpack.packb(coded(value))) == value


ENTRY = st.sampled_from(
    [
        lambda i: np.full(3, i, np.float32),
        lambda i: np.int32(i),
        lambda i: float(i),
        lambda i: i,
        lambda i: -1 - i,
        lambda i: i % 2 == 0,
        lambda i: {"a": np.full((2, 2), i % 200, np.uint8), "b": np.int64(i)},
        lambda i: [np.int32(i), np.full(1, i, np.float64)],
        lambda i: {},
        lambda i: {"x": {"y": i / 2}},
    ]
)


@given(ENTRY, st.sampled_from([1, 2, 5, 20, 300]))
def test_lists_read_as_columns_hold_what_the_values_are(make, num):
    values = [make(i) for i in range(num)]
    data = msgpack.packb([coded(values), "after"])
    reader = MsgpackReader(data)
    assert reader.list_size() == 2
    got, _ = reader.entries()
    assert reader.scalar() == "after"
    if got is None:  # integers of several widths have no common stride
        assert num > 20
        assert unpack(data)[0] == values
        return
    for path, column in got.items():
        for value, found in zip(values, column, strict=True):
            for part in path:
                value = value[int(part) if isinstance(value, list) else part]
            np.testing.assert_array_equal(found, value)


def test_a_template_that_no_longer_fits_is_left():
    reader = MsgpackReader(msgpack.packb([coded([np.zeros(3)] * 4), coded([np.ones(2)] * 3), [1, "a"]]))
    reader.list_size()
    first, template = reader.entries()
    second, other = reader.entries(template)
    assert first[()].shape == (4, 3)
    assert second[()].shape == (3, 2)
    assert template != other
    assert reader.entries(other) == (None, None)
    assert reader.place == len(reader.data)


def nd(**changes):
    head = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": bytes(8)}
    return msgpack.packb(head | {key.encode(): value for key, value in changes.items()})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nd(kind=b"O"), "object array, which would need unpickling"),
        (nd(type="|O"), "of type '|O'"),
        (nd(type="<M8[ns]"), "only booleans, integers and floats"),
        (nd(shape=[3]), r"shape \[3\] and type <f4 has 8 bytes"),
        (nd(shape=[2**40, 2**40]), "has 8 bytes"),
        (nd(shape=[-1]), r"shape \[-1\]"),
        (nd(data=[1]), "no bytes"),
        (msgpack.packb({b"complex": True, b"data": "1j"}), "complex"),
        (msgpack.packb(msgpack.ExtType(5, b"x")), "extension value of type 5"),
        (b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
        (b"\xdd\xff\xff\xff\xff" * 500, "not valid msgpack"),
        (b"", "not valid msgpack"),
        (b"\x81\x91\x01\x01", "not valid msgpack"),
    ],
)
def test_what_is_refused(data, message):
    with pytest.raises(DataError, match=message):
        unpack(data)


def test_mutated_documents_end_only_in_data_errors():
    rng = np.random.default_rng(0)
    good = msgpack.packb(coded({"a": [np.zeros(3, np.float32)] * 3, "b": [{"x": np.int32(1)}] * 2, "c": "text"}))
    refused = 0
    for _ in range(400):
        data = mutated(good, rng)
        try:
            unpack(data)
        except DataError:
            refused += 1
    assert 50 < refused < 400
