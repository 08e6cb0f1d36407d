# SPDX-License-Identifier: Apache-2.0
"""Packed arrays against pickles that Python itself writes; nothing that a pickle asks for is ever called."""

import base64
import builtins
import os
import pickle
from collections import OrderedDict

import numpy as np
import pyarrow as pa
import pytest
from some_rllib import mutated, packed

from etude.errors import DataError
from etude.recordings.formats.packed import decompress, unpack, unpack_rows, unpickle

# Two texts as RLlib 2.60 (NumPy 2) and Ray's test data of 2021 (NumPy 1) hold them.
NUMPY_2 = (
    "BCJNGGhAjwAAAAAAAAAdigAAAFKABZWEAAEA8hqME251bXB5Ll9jb3JlLm51bWVyaWOUjAtfZnJvbWJ1ZmZlcpSTlCiWEC8A8QUAm3M2vcB1eDz2+688"
    "sDpFPZSMBUEA8RaUjAVkdHlwZZSTlIwCZjSUiYiHlFKUKEsDjAE8lE5OTkr/////BQDwA0sAdJRiSwSFlIwBQ5R0lFKULgAAAAA="
)
NUMPY_1 = (
    "BCJNGGhAjgAAAAAAAABxiQAAAFKABZWDAAEA8hmMEm51bXB5LmNvcmUubnVtZXJpY5SMC19mcm9tYnVmZmVylJOUKJYMLgDxAQDBaDi/lZAxP2QkX76U"
    "jAU8APEYlIwFZHR5cGWUk5SMAmY0lEsASwGHlFKUKEsDjAE8lE5OTkr/////BQDwBUsAdJRiSwFLA4aUjAFDlHSUUpQuAAAAAA=="
)

VALUES = [
    np.arange(6.0, dtype=np.float32).reshape(2, 3),
    np.arange(6)[::2],
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.zeros((0, 3)),
    np.array(True),
    np.arange(3, dtype=">i4"),
    np.float32(3.5),
    (np.int32(2), np.zeros(1, np.float32)),
    {"a": np.ones(3), "b": [1, 2.5, None, True, "x", b"yy", -5, 2**40, ()]},
    OrderedDict(pos=np.ones(2)),
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:30])
def test_values_come_back(value, protocol):
    got = unpack(packed(pickle.dumps(value, protocol)))
    np.testing.assert_equal(got, value)
    assert getattr(got, "shape", ()) == getattr(value, "shape", ())


def test_texts_of_real_recordings():
    (old,) = unpack(NUMPY_1)
    np.testing.assert_allclose(old, [-0.7203484, 0.6936124, -0.2179123], rtol=1e-6)
    row = unpack(NUMPY_2)
    assert (row.dtype, row.shape) == (np.float32, (4,))
    np.testing.assert_allclose(row, [-0.04454384, 0.01516479, 0.02148245, 0.04815167], rtol=1e-5)


def test_old_names_of_numpy_are_known():
    data = pickle.dumps(np.arange(4), 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    np.testing.assert_array_equal(unpickle(data), np.arange(4))


class Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


class Opener:
    def __reduce__(self):
        return builtins.open, ("/nowhere", "w")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Evil(), "the name `posix.system`"),
        ([np.zeros(2), Opener()], "the name `.*open`"),
        (np.array([{}], object), "an array of objects"),
        (np.array(["a"]), "the dtype 'U1'"),
        (np.zeros(2, [("a", "i4")]), "the dtype 'V4'"),
        (1j, "the name `builtins.complex`"),
        (eval, "the name `builtins.eval`"),
        (np.dtype("f4"), "a dtype or function as a value"),
        (np.ma.zeros(2), "the name `numpy.ma"),
    ],
)
def test_everything_else_is_refused_by_name(value, message):
    with pytest.raises(DataError, match=message):
        unpickle(pickle.dumps(value, 4))


def call(name: bytes, *arguments: bytes) -> bytes:
    return b"\x80\x04c" + name.replace(b".", b"\n", 1) + b"\n(" + b"".join(arguments) + b"tR."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04cnumpy\nload\n.", "the name `numpy.load`"),
        (b"\x80\x04}(]K\x01u.", "keys that are not plain values"),
        (b"\x80\x04]q\x00h\x00a.", "the same list twice"),
        (b"\x80\x04K\x01K\x02R.", "a call of something that is not a function"),
        (b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "ends too early"),
        (b"\x80\x04.", "broken"),
        (b"\x80\x04I1\n.", "the opcode 'I'"),
        (b"\x80\x04t.", "broken"),
        (call(b"numpy.dtype", b"\x8c\x01O"), "an array of objects"),
        (call(b"_codecs.encode", b"\x8c\x01a", b"\x8c\x04utf8"), "the encoding 'utf8'"),
    ],
)
def test_pickles_that_are_not_valid_or_not_harmless(data, message):
    with pytest.raises(DataError, match=message):
        unpickle(data)


def test_sizes_are_checked_before_anything_is_made():
    data = pickle.dumps(np.arange(4, dtype=np.uint8), 5)
    assert b"K\x04\x85" in data
    with pytest.raises(DataError, match=r"an array of shape \(2147483647,\) and type uint8 in 4 bytes"):
        unpickle(data.replace(b"K\x04\x85", b"J\xff\xff\xff\x7f\x85"))


def test_what_grows_by_being_used_many_times_is_refused():
    """Each would take gigabytes from a pickle of less than a megabyte."""
    many = 50_000
    numbers = b"(" + b"K\x01" * 100_000 + b"tq\x00"
    raw = b"B" + (400_000).to_bytes(4, "little") + bytes(400_000) + b"q\x00"
    text = b"X" + (400_000).to_bytes(4, "little") + b"a" * 400_000 + b"q\x00"
    dtype = b"cnumpy\ndtype\nq\x01\x8c\x02i4\x85Rq\x02(K\x03\x8c\x01>NNNtb"
    frombuffer = b"cnumpy.core.numeric\n_frombuffer\nq\x03"
    array = b"h\x03(h\x00h\x02J" + (100_000).to_bytes(4, "little") + b"\x85\x8c\x01CtR"
    encoded = b"h\x01h\x00\x8c\x06latin1\x86R"
    for data, message in (
        (numbers + b"](" + b"h\x00" * many + b"e", "the same tuple twice"),
        (raw + dtype + frombuffer + b"](" + array * many + b"e", "more copies of the same bytes"),
        (
            text + b"c_codecs\nencode\nq\x01](" + encoded * many + b"e",
            "more copies of the same bytes",
        ),
    ):
        with pytest.raises(DataError, match=message):
            unpickle(b"\x80\x04" + data + b".")


def test_a_key_nested_deeper_than_the_stack_of_the_process_is_refused():
    with pytest.raises(DataError, match="keys that are not plain values"):
        unpickle(b"\x80\x04})" + b"\x85" * 250_000 + b"K\x01s.")
    with pytest.raises(DataError, match="a pickle"):
        unpickle(b"\x80\x04)" + b"\x85" * 250_000 + b"\x8c\x01a\x93.")


def test_a_memo_index_allocates_nothing():
    assert unpickle(b"\x80\x04K\x01r\xff\xff\xff\xff.") == 1


def test_an_array_used_twice_is_read_twice():
    array = np.arange(5.0)
    first, second = unpickle(pickle.dumps([array, array]))
    np.testing.assert_array_equal(first, array)
    np.testing.assert_array_equal(second, array)


def test_frames_that_are_broken_or_say_too_much():
    frame = base64.b64decode(NUMPY_2)
    assert len(decompress(frame)) == int.from_bytes(frame[6:14], "little")
    with pytest.raises(DataError, match="which is impossible"):
        decompress(frame[:6] + b"\xff" * 7 + frame[13:])
    with pytest.raises(DataError, match="can't be decoded"):
        decompress(frame[:-20])
    with pytest.raises(DataError, match="no LZ4 frame"):
        unpack(base64.b64encode(b"something else").decode())
    with pytest.raises(DataError, match="'plain text, not ' is not a packed|is not base64"):
        unpack("plain text, not packed")


def test_a_frame_without_its_size_is_bounded():
    bomb = pa.Codec("lz4").compress(bytes(1 << 20), asbytes=True)
    assert decompress(bomb) == bytes(1 << 20)


def test_rows_alike_are_those_decoded_one_by_one():
    rng = np.random.default_rng(0)
    rows = [rng.standard_normal(4).astype(np.float32) for _ in range(20)]
    rows += [np.zeros(4, np.float32), np.ones(3), rng.standard_normal((2, 2))]
    got = unpack_rows([packed(pickle.dumps(row, 5)) for row in rows])
    for row, found in zip(rows, got, strict=True):
        np.testing.assert_array_equal(found, row)
        assert found.dtype == row.dtype


@pytest.mark.parametrize("protocol", [2, 5])
def test_mutated_pickles_end_only_in_data_errors(protocol):
    rng = np.random.default_rng(protocol)
    good = pickle.dumps({"a": np.arange(3.0), "b": (np.float32(1), "x", [1, 2.5])}, protocol)
    refused = 0
    for _ in range(400):
        try:
            unpickle(mutated(good, rng))
        except DataError:
            refused += 1
    assert 100 < refused < 400
