# SPDX-License-Identifier: Apache-2.0
"""Entries laid out as arrays, against msgpack of one Python object for each."""

import msgpack
import numpy as np
import pytest
from some_rllib import coded

from etude.recordings.formats.msgpack_numpy import entries, list_header, list_of, map_header, packed


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "u1", "i1", "bool", "f2"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (7, 50), (300, 300)])
def test_each_entry_is_what_an_object_would_be(dtype: str, shape: tuple[int, ...]) -> None:
    column = (np.random.default_rng(0).random((3, *shape)) * 50).astype(dtype)
    assert list_of(entries(column)) == msgpack.packb(coded(list(column)))


def test_nested_entries() -> None:
    a, b = np.arange(4, dtype=np.float32), np.arange(8).reshape(4, 2)
    tree = {"a": a, "more": {"long" * 20: b}, "pair": (a, [b])}
    naive = [{"a": a[i], "more": {"long" * 20: b[i]}, "pair": [a[i], [b[i]]]} for i in range(4)]
    assert list_of(entries(tree)) == msgpack.packb(coded(naive))


def test_plain_numbers_are_msgpacks_own() -> None:
    column = np.array([0.5, -np.inf, 3e300])
    assert list_of(entries(column, plain=True)) == msgpack.packb(column.tolist())
    assert list_of(entries(np.array([1, 2]), plain=True)) == msgpack.packb([1.0, 2.0])
    short = list_of(entries(np.array([0.1], np.float32), plain=True))
    assert short == msgpack.packb([float(np.float32(0.1))], use_single_float=True)


def test_columns_that_are_not_contiguous() -> None:
    column = np.arange(24, dtype=np.int32).reshape(4, 6)[:, ::2]
    assert list_of(entries(column)) == msgpack.packb(coded(list(column)))


@pytest.mark.parametrize("size", [0, 15, 16, 65_535, 65_536])
def test_headers_and_plain_values(size: int) -> None:
    packer = msgpack.Packer()
    assert list_header(size) == packer.pack_array_header(size)
    assert map_header(size) == packer.pack_map_header(size)
    assert packed(np.bool_(True)) == msgpack.packb(coded(np.bool_(True)))
    assert packed(None) == b"\xc0"
